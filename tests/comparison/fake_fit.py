"""Stands in for ``fit`` in tests of what starts it: same options and files, no training, and light to start."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

stopped: list[bool] = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))

options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
settings = json.loads(Path(options["--config"]).read_text())
folder = Path(options["--trainer.default_root_dir"]) / "lightning_logs"
version = folder / f"version_{len(list(folder.glob('version_*')))}"
saved = sorted(folder.glob("version_*/checkpoints/last.ckpt"))
first = int(saved[-1].read_text()) + 1 if "--ckpt_path" in options else 1
(version / "checkpoints").mkdir(parents=True)
print("seed", options["--seed_everything"], "from round", first, flush=True)
if settings.get("fails"):
    sys.exit(3)
rows = [f"step,val/accuracy,{settings.get('tested', 'test/accuracy,test/loss')}"]
for number in range(first, settings["rounds"] + 1):
    time.sleep(settings.get("sleep", 0))
    last = number == settings["rounds"]
    rows.append(f"{number},{number / 10},{',' if not last else '0.5,1.5'}")
    (version / "metrics.csv").write_text("\n".join(rows) + "\n")
    (version / "checkpoints" / "last.ckpt").write_text(str(number))
    if stopped:
        break
