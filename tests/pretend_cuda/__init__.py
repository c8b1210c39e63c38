"""A pretend CUDA device: the CUDA path runs, with real numbers, on a machine without a GPU or a driver.

Tensors say that they are on ``cuda:0`` and compute on the CPU (:mod:`tests.pretend_cuda.device`); graphs are emulated
(:mod:`tests.pretend_cuda.graphs`). What needs it runs in a process of its own, in which a small library answers for the
driver (:mod:`tests.pretend_cuda.process`). The rules of CUDA that it enforces, each with a seeded fault in
``tests/pretend_cuda/device_rules.py``:

* tensors of an operation are on one device; numbers without dimensions may come from the CPU;
* where the host waits for the device is counted by line, and refused where ``set_sync_debug_mode("error")`` asks so;
* an upload that blocks is counted by line; an asynchronous download holds garbage until the host has waited;
* memory is counted, and runs out;
* a capture launches nothing, and refuses host waits and copies from the CPU; a replay repeats the operations on the
  same storages, with the numbers of the host as they were; it fails if an input has been freed; what was allocated in a
  capture is garbage after the capture and after every replay.

It cannot show what cuDNN and cuBLAS compute, races between streams, fragmented memory, NCCL, or speed.
"""
