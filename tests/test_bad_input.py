# ruff: noqa: E501 (a row of a table is one line)
"""Wrong input through the real entry point: one line that names the key or the file and says what to do.

Every row of a table is run in a process of its own, forked after the imports, in a folder with the files below. A
process that ends with a traceback, prints more than one line, hangs or leaves a run folder behind fails its row.
"""

from __future__ import annotations

import gc
import os
import resource
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_fedssl.cli.entry import main
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit
from lightning_fedssl.models import MLP
from tests.forked_command import prepare_forks
from tests.test_cli import CONFIG

Row = tuple[str, int, str]
"""What is typed, the exit code (2: the arguments cannot be read; 1: the command refuses them), words of the message."""

SECONDS = 60
"""A row that takes longer hangs."""

# fmt: off
TRAINER: list[Row] = [
    ('--trainer.max_rounds -1', 1, 'trainer.max_rounds is -1: give 1 or more'),
    ('--trainer.max_rounds 1.5', 2, 'trainer.max_rounds: expected a whole number, got 1.5'),
    ('--trainer.max_rounds []', 2, 'trainer.max_rounds: expected a whole number, got []'),
    ('--trainer.max_rounds null', 2, 'trainer.max_rounds: expected a whole number, got None'),
    ('--trainer.max_rounds .inf', 2, 'trainer.max_rounds: expected a whole number, got inf'),
    ('--trainer.clients_per_round 0', 1, 'trainer.clients_per_round is 0: give 1 or more'),
    ('--trainer.clients_per_round -3', 1, 'trainer.clients_per_round is -3: give 1 or more'),
    ('--trainer.clients_per_round all', 2, 'trainer.clients_per_round: expected a whole number, got all'),
    ('--trainer.clients_at_once 0', 1, 'trainer.clients_at_once is 0: give a whole number from 1 on, or auto'),
    ('--trainer.clients_at_once fast', 2, 'trainer.clients_at_once: expected a whole number or auto, got'),
    ('--trainer.clients_at_once true', 2, 'trainer.clients_at_once: expected a whole number or auto, got'),
    ('--trainer.accelerator tpuu', 1, 'trainer: accelerator tpuu, devices 1, strategy auto, precision 32-true'),
    ('--trainer.accelerator mps', 1, 'trainer.accelerator is mps, which has no 64-bit sums; use cpu'),
    ('--trainer.devices 0', 1, 'trainer: accelerator cpu, devices 0, strategy auto, precision 32-true'),
    ('--trainer.devices -1', 1, 'trainer: accelerator cpu, devices -1, strategy auto, precision 32-true'),
    ('--trainer.devices [0,1]', 1, 'trainer: accelerator cpu, devices [0, 1], strategy auto, precision'),
    ('--trainer.devices 100000', 1, 'trainer.devices is 100000: on a CPU these are processes, and this machine has'),
    ('--trainer.devices many', 1, 'trainer: accelerator cpu, devices many, strategy auto, precision'),
    ('--trainer.num_nodes 0', 1, 'trainer.num_nodes is 0: give 1 or more'),
    ('--trainer.strategy fsdp', 1, 'trainer.strategy is fsdp: it splits one large model over devices, but'),
    ('--trainer.strategy deepspeed', 1, 'trainer.strategy is deepspeed: it splits one large model over devices,'),
    ('--trainer.strategy nothing', 1, 'trainer: accelerator cpu, devices 1, strategy nothing, precision'),
    ('--trainer.precision 16', 2, 'trainer.precision: expected one of 32-true, bf16-mixed, 64-true, got 16'),
    ('--trainer.precision 16-mixed', 2, 'trainer.precision: expected one of 32-true, bf16-mixed, 64-true, got'),
    ('--trainer.callbacks 3', 2, 'trainer.callbacks: there is no class 3; there are:'),
    ('--trainer.callbacks EarlyStopping', 2, 'trainer.callbacks: EarlyStopping needs monitor'),
    ('--trainer.callbacks DeviceStatsMonitor', 1, "trainer.callbacks: DeviceStatsMonitor needs Lightning's own training"),
    ('--trainer.callbacks Nothing', 2, 'trainer.callbacks: there is no class Nothing; there are:'),
    ('--trainer.callbacks [FederatedCheckpoint,Nothing]', 2, 'trainer.callbacks: there is no class Nothing; there are:'),
    ('--trainer.callbacks.every_n_rounds 0', 2, 'trainer.callbacks: name the class before its argument every_n_rounds:'),
    ('--trainer.system 3', 2, 'trainer.system: '),  # other tests may define classes that the message then lists
    ('--trainer.system SystemModel', 2, 'trainer.system: SystemModel needs devices'),
    ('--trainer.system SystemModel --trainer.system.devices []', 1, 'trainer.system.devices is empty: give at least one device, with name'),
    ("--trainer.system SystemModel --trainer.system.devices '[{name: a, seconds: 1}]' --trainer.system.upload_mbit_s [5,1]", 1, 'trainer.system.upload_mbit_s is [5.0, 1.0]: give two rates above 0, the'),
    ("--trainer.system SystemModel --trainer.system.devices '[{name: a, seconds: 1}]' --trainer.system.upload_mbit_s [5]", 2, 'trainer.system.upload_mbit_s: expected tuple with 2 elements, got [5]'),
    ("--trainer.system SystemModel --trainer.system.devices '[{name: a, seconds: 1}]' --trainer.system.server_step_s -1", 1, 'trainer.system.server_step_s is -1.0: give 0 (not counted) or more'),
    ("--trainer.system SystemModel --trainer.system.devices '[{name: a, seconds: 1}]' --trainer.system.per day", 2, 'trainer.system.per: expected one of step, image, got day'),
    ('--trainer.availability Nothing', 2, 'trainer.availability: there is no class Nothing; there are: DiurnalDropout, RandomDropout'),
    ('--trainer.availability 3', 2, 'trainer.availability: there is no class 3; there are: DiurnalDropout, RandomDropout,'),
    ('--trainer.availability RandomDropout --trainer.availability.probability 2', 1, 'trainer.availability: RandomDropout.probability is 2.0: give a'),
    ('--trainer.availability RandomDropout --trainer.availability.rate 0.5', 2, 'trainer.availability: RandomDropout takes no rate; there are: probability'),
    ('--trainer.availability UnevenDropout --trainer.availability.lowest 0.9', 1, 'UnevenDropout.lowest is 0.9, above highest, 0.5: exchange them'),
    ('--trainer.availability DiurnalDropout --trainer.availability.amplitude 0.9', 1, 'DiurnalDropout has mean 0.3 and amplitude 0.9'),
    ('--trainer.deadline_s 5', 1, 'trainer.deadline_s is 5 simulated seconds, but nothing says how long a client'),
    ('--trainer.deadline_s -1', 1, 'trainer.deadline_s is -1.0: give simulated seconds above 0, or null'),
    ('--trainer.deadline_s soon', 2, 'trainer.deadline_s: expected a number, got soon'),
    ('--trainer.over_selection -0.1', 1, 'trainer.over_selection is -0.1: give 0 or more; 0.3 selects 30 % more'),
    ('--trainer.over_selection 99', 1, 'trainer.over_selection 99 selects'),
    ('--trainer.logger 3', 2, 'trainer.logger: there is no class 3; there are: CSVLogger, CometLogger,'),
    ('--trainer.logger Nothing', 2, 'trainer.logger: there is no class Nothing; there are: CSVLogger,'),
    ('--trainer.check_val_every_n_rounds 0', 1, 'trainer.check_val_every_n_rounds is 0: give 1 or more'),
    ('--trainer.check_val_every_n_rounds x', 2, 'trainer.check_val_every_n_rounds: expected a whole number, got x'),
    ('--trainer.fast_dev_run 7', 2, 'trainer.fast_dev_run: expected true or false, got 7'),
    ('--trainer.deterministic maybe', 2, 'trainer.deterministic: expected true or false, got maybe'),
    ('--trainer.client_store cloud', 2, 'trainer.client_store: expected one of memory, disk, got cloud'),
    ('--trainer.cuda_graphs 3', 2, 'trainer.cuda_graphs: expected true or false, got 3'),
    ('--trainer.enable_progress_bar 3', 2, 'trainer.enable_progress_bar: expected true or false, got 3'),
    ('--trainer.default_root_dir run.yaml', 1, 'trainer.default_root_dir: the folder run.yaml/lightning_logs cannot be'),
    ('--trainer.default_root_dir /proc/nothing', 1, 'trainer.default_root_dir: the folder /proc/nothing/lightning_logs'),
    ('--trainer.default_root_dir /dev/null/x', 1, 'trainer.default_root_dir: the folder /dev/null/x/lightning_logs cannot'),
    ('--trainer.max_epochs 3', 2, 'there is no option --trainer.max_epochs; did you mean --trainer.max_rounds?'),
    ('--trainer.metrics macro_f1', 2, 'trainer.metrics: expected a list in brackets, got macro_f1'),
    ('--trainer.gpus 1', 2, 'there is no option --trainer.gpus; did you mean --trainer?'),
    ('--trainer 3', 2, "trainer: Unable to load config '3'"),
    ('--trainer.callbacks+=3', 2, 'trainer.callbacks: there is no class 3; there are:'),
    ('--trainer.callbacks+=GradientDiversity --trainer.callbacks.x 3', 2, 'trainer.callbacks: GradientDiversity takes no x; there are:'),
    ('--trainer.callbacks+=ClientEvaluation --trainer.callbacks.every_n_rounds x', 2, 'trainer.callbacks.every_n_rounds: expected a whole number, got x'),
    ('--trainer.metrics run.yaml', 2, 'trainer.metrics: expected a list in brackets, got run.yaml'),
]

MODEL: list[Row] = [
    ('--model 3', 2, 'model: there is no class 3; there are: DataSharing, EASGD, FedAvg,'),
    ('--model FedAvg', 1, 'FedAvg trains clients on labels: set data.label_location to clients'),
    ('--model Nothing', 2, 'model: there is no class Nothing; there are: DataSharing, EASGD,'),
    ('--model torch.nn.Linear', 2, 'model: torch.nn.Linear is no FederatedAlgorithm; there are:'),
    ('--model os.system', 2, 'model: os.system is no FederatedAlgorithm; there are: DataSharing,'),
    ('--model builtins.eval', 2, 'model: builtins.eval is no FederatedAlgorithm; there are: DataSharing,'),
    ('--model.network MLP --model.network.hidden [-1]', 1, 'model.network: MLP cannot be built'),
    ('--model.network MLP --model.network.hidden [0]', 1, 'model.network: hidden.0.weight of MLP has the shape (0, 64) and so no'),
    ('--model.network MLP --model.network.hidden [1000000000]', 1, 'model.network: MLP cannot be built'),
    ('--model.network MLP --model.network.hidden 8', 2, 'model.network.hidden: expected a list in brackets, got 8'),
    ('--model.network CNN --model.network.width -1', 1, 'model.network: CNN cannot be built'),
    ('--model.network CNN --model.network.width 0', 1, 'model.network: convs.0.weight of CNN has the shape (0, 1, 3, 3)'),
    ('--model.network CNN --model.network.width 1000000', 1, 'model.network: CNN cannot be built'),
    ('--model.network CNN --model.network.norm nothing', 2, 'model.network.norm: expected one of batch, static_batch, group, none,'),
    ('--model.network CNN --model.network.width 1.5', 2, 'model.network.width: expected a whole number, got 1.5'),
    ('--model.network ResNet99', 2, 'model.network: there is no class ResNet99; did you mean ResNet9?'),
    ('--model.network WideResNet28x2 --model.network.depth 3', 2, 'model.network: there is no class WideResNet28x2; did you mean'),
    ('--model.network torch.nn.Linear', 2, 'model.network: Linear needs in_features, out_features'),
    ('--model.network torch.nn.ReLU', 1, 'model.network: ReLU gave (2, 1, 8, 8) for two samples of shape (1, 8,'),
    ('--model.network torchvision.models.nothing', 2, "model.network: module 'torchvision.models' has no attribute 'nothing'"),
    ('--model.network torchvision.models.resnet18', 1, 'model.network: ResNet cannot take samples of shape (1, 8, 8): Given'),
    ('--model.network 3', 2, 'model.network: there is no class 3; there are: AlexNet, CNN, CNN13,'),
    ('--model.network os.getcwd', 2, 'model.network: os.getcwd does not say that it returns torch.nn.Module: write'),
    ('--model.network null', 2, 'model: SemiFL needs network'),
    ('--model.schedule Nothing', 2, 'model.schedule: there is no class Nothing; there are: Constant, Cosine,'),
    ('--model.schedule Cosine --model.schedule.final -1', 1, 'model.schedule.final is -1.0: give 0 or more; a learning rate cannot be'),
    ('--model.schedule Cosine --model.schedule.x 1', 2, 'model.schedule: Cosine takes no x; there are: final, rounds'),
    ('--model.schedule 3', 2, 'model.schedule: there is no class 3; there are: Constant, Cosine,'),
    ('--model.client_epochs 0', 1, 'model.client_epochs is 0.0: give a finite number above 0'),
    ('--model.client_epochs -1', 1, 'model.client_epochs is -1.0: give a finite number above 0'),
    ('--model.client_epochs x', 2, 'model.client_epochs: expected a number, got x'),
    ('--model.client_epochs .nan', 1, 'model.client_epochs is nan: give a finite number above 0'),
    ('--model.client_epochs .inf', 1, 'model.client_epochs is inf: give a finite number above 0'),
    ('--model.server_epochs -1', 1, 'model.server_epochs is -1.0: give 0 (no server training) or more'),
    ('--model.server_epochs .nan', 1, 'model.server_epochs is nan: give 0 (no server training) or more'),
    ('--model.server_epochs .inf', 1, 'model.server_epochs is inf: give 0 (no server training) or more'),
    ('--model.server_phase never', 2, 'model.server_phase: expected one of after, before, parallel, got never'),
    ('--model.server_weight 2', 1, 'model.server_weight is 2.0: give a share between 0 and 1'),
    ('--model.server_momentum 1', 1, 'model.server_momentum is 1.0: give a number from 0 to below 1'),
    ('--model.server_momentum -1', 1, 'model.server_momentum is -1.0: give a number from 0 to below 1'),
    ('--model.gradient_clip_norm 0', 1, 'model.gradient_clip_norm is 0.0: give a number above 0, or null for none'),
    ('--model.gradient_clip_norm inf', 2, 'model.gradient_clip_norm: expected a number, got inf; YAML writes infinity as'),
    ('--model.network CNN13 --model.network.dropout 1.5', 1, 'model.network.dropout is 1.5: give 0 or more and less'),
    ('--model.network WideResNet --model.network.widen_factor 0', 1, 'model.network.widen_factor is 0: give 1 or more'),
    ('--model.gradient_clip_norm -1', 1, 'model.gradient_clip_norm is -1.0: give a number above 0, or null for'),
    ('--model.gradient_clip_norm .nan', 1, 'model.gradient_clip_norm is nan: give a number above 0, or null for none'),
    ('--model.keep_client_optimizer 3', 2, 'model.keep_client_optimizer: expected true or false, got 3'),
    ('--model.client_weighting size', 2, 'model.client_weighting: expected one of samples, uniform, got size'),
    ('--model.threshold -0.1', 1, 'model.threshold is -0.1: give a probability between 0 and 1; the'),
    ('--model.threshold .nan', 1, "model.threshold is nan: give a probability between 0 and 1; the paper's"),
    ('--model.mix_weight -1', 1, 'model.mixup_alpha must be above 0, model.mix_weight at least 0,'),
    ('--model.mix_alpha 0', 2, 'model: SemiFL takes no mix_alpha; did you mean --model.mixup_alpha?'),
    ('--model.num_classes 3', 1, 'model.num_classes is 3, but the data have 10: leave it out, the data'),
    ('--model.num_classes x', 2, 'model.num_classes: expected a whole number, got x'),
    ('--model.in_shape [1]', 1, 'model.in_shape is (1,), but the data have (1, 8, 8): leave it out'),
    ('--model.in_shape [3,8,8]', 1, 'model.in_shape is (3, 8, 8), but the data have (1, 8, 8): leave it out,'),
    ('--model.lr 0.1', 2, 'model: SemiFL takes no lr; did you mean --model.optimizer.lr?'),
    ('--model', 2, 'model needs a value'),
]

OPTIMIZERS: list[Row] = [
    ('--model.optimizer.lr -1', 1, 'model.optimizer: Invalid learning rate: -1.0; change'),
    ('--model.optimizer.lr .nan', 1, 'model.optimizer: the learning rate is nan; give a finite number'),
    ('--model.optimizer.lr .inf', 1, 'model.optimizer: the learning rate is inf; give a finite number'),
    ('--model.optimizer.lr x', 2, 'model.optimizer.lr: expected a number, got x'),
    ('--model.optimizer.momentum -1', 1, 'model.optimizer: Invalid momentum value: -1.0; change'),
    ('--model.optimizer.weight_decay -1', 1, 'model.optimizer: Invalid weight_decay value: -1.0; change'),
    ('--model.optimizer.nesterov true', 1, 'model.optimizer: Nesterov momentum requires a momentum and zero'),
    ('--model.optimizer LBFGS', 1, 'model.optimizer is LBFGS, which needs sparse gradients or computes the'),
    ('--model.optimizer SparseAdam', 1, 'model.optimizer is SparseAdam, which needs sparse gradients or computes'),
    ('--model.optimizer Muon', 1, 'model.optimizer: Muon only supports 2D parameters whereas we found a'),
    ('--model.optimizer Adam --model.optimizer.betas [2,2]', 1, 'model.optimizer: Invalid beta parameter at index 0: 2.0; change'),
    ('--model.optimizer Adam --model.optimizer.betas 3', 2, 'model.optimizer.betas: expected a list in brackets, got 3'),
    ('--model.optimizer Nothing', 2, 'model.optimizer: there is no class Nothing; there are: ASGD, Adadelta,'),
    ('--model.optimizer 3', 2, 'model.optimizer: there is no class 3; there are: ASGD, Adadelta,'),
    ('--model.optimizer torch.nn.Linear', 2, 'model.optimizer: torch.nn.Linear is no Optimizer; there are: ASGD,'),
    ('--model.optimizer null', 1, "model.optimizer: 'NoneType' object is not callable; change"),
    ('--model.server_optimizer LBFGS', 1, 'model.server_optimizer is LBFGS, which needs sparse gradients or'),
    ('--model.server_optimizer SGD --model.server_optimizer.lr -2', 1, 'model.server_optimizer: Invalid learning rate: -2.0; change'),
]

DATA: list[Row] = [
    ('--data.dataset nothing', 1, "data.dataset: 'nothing' is not a known data set; choose one of digits,"),
    ('--data.dataset mnist', 1, "data.root: mnist was not found, or is damaged, in 'data' (the folder"),
    ('--data.dataset minst', 1, "data.dataset: 'minst' is not a known data set; did you mean mnist? Choose one of digits, mnist,"),
    ('--data.dataset cifar10 --data.root run.yaml', 1, "data.root: cifar10 was not found, or is damaged, in 'run.yaml' (this is a file, not a folder)"),
    ('--data.dataset svhn --data.root /nowhere', 1, "data.root: svhn was not found, or is damaged, in '/nowhere' (the folder"),
    ('--data.dataset image_folder', 1, 'data.image_size: image_folder needs the side of its images in pixels,'),
    ('--data.dataset image_folder --data.image_size 0', 1, 'data.image_size must be a whole number of at least 1, got 0'),
    ('--data.dataset image_folder --data.image_size 8 --data.root /nowhere', 1, "data.root: image_folder looked for '/nowhere/train/<class>' and found"),
    ('--data.dataset digits --data.image_size 8', 1, 'data.image_size: digits has a fixed size; leave it out (it is for'),
    ('--data.dataset digits --data.cache_dir cache', 1, 'data.cache_dir: digits is held in memory; leave it out (it is for'),
    ('--data.dataset ImageTable --data.dataset.csv_file no.csv --data.dataset.image_size 8 --data.weak crop --data.strong none', 1, "data.dataset: the CSV file 'no.csv' does not exist"),
    ('--data.dataset ImageTable --data.dataset.csv_file run.yaml --data.dataset.image_size 8 --data.weak crop --data.strong none', 1, "data.dataset: 'run.yaml' has no column 'file' (file_column), 'label'"),
    ('--data.dataset ImageTable', 2, 'data.dataset: ImageTable needs csv_file'),
    ('--data.dataset SiteFolders --data.dataset.root no --data.dataset.image_size 8 --data.weak crop --data.strong none', 1, "data.dataset: SiteFolders looked for 'no/<site>/<class>' and found 0"),
    ('--data.dataset Arrays --data.dataset.path run.yaml --data.weak none --data.strong none', 1, "data.dataset: 'run.yaml' is no readable file of numpy.savez with arrays of numbers"),
    ('--data.dataset HuggingFace --data.dataset.path x --data.weak none --data.strong none', 1, 'data.dataset: HuggingFace needs the library datasets; install it, in a checkout of this package: '),
    ('--data.dataset BreastCancer', 1, "data.weak: 'auto' is a view of 8-bit images, but samples are numbers of"),
    ('--data.dataset ImageTabel', 1, "data.dataset: 'ImageTabel' is not a known data set; choose one of digits,"),
    ('--data.num_clients 0', 1, 'data.num_clients must be a whole number of at least 1, got 0'),
    ('--data.num_clients 1.5', 2, 'data.num_clients: expected a whole number, got 1.5'),
    ('--data.num_clients 100000', 1, 'data.num_clients: 100000 clients cannot share 160 samples; lower'),
    ('--data.num_labels 0', 1, 'data.num_labels must be a whole number of at least 1, or "all"; got 0'),
    ('--data.num_labels 3', 1, 'data.num_labels: 3 labels cannot cover 10 classes; ask for more'),
    ('--data.num_labels 100000', 1, 'data.num_labels: 100000 labels, but only 180 training samples to label;'),
    ('--data.num_labels -1', 1, 'data.num_labels must be a whole number of at least 1, or "all"; got -1'),
    ('--data.num_labels most', 2, 'data.num_labels: expected a whole number or all, got most'),
    ('--data.label_location nowhere', 2, 'data.label_location: expected one of server, clients, got nowhere'),
    ('--data.label_location clients', 1, "SemiFL fine-tunes on the server's labels: set data.label_location to"),
    ('--data.server_batch_size 0', 1, 'data.server_batch_size must be a whole number of at least 1, got 0'),
    ('--data.client_batch_size -1', 1, 'data.client_batch_size must be a whole number of at least 1, got -1'),
    ('--data.client_batch_size 1.5', 2, 'data.client_batch_size: expected a whole number, got 1.5'),
    ('--data.eval_batch_size 0', 1, 'data.eval_batch_size must be a whole number of at least 1, got 0'),
    ('--data.validation 1', 1, 'data.validation must be a fraction from 0 to below 1, or "test"; got 1.0'),
    ('--data.validation -0.1', 1, 'data.validation must be a fraction from 0 to below 1, or "test"; got'),
    ('--data.validation .nan', 1, 'data.validation must be a fraction from 0 to below 1, or "test"; got nan'),
    ('--data.validation train', 2, 'data.validation: expected a number or test, got train'),
    ('--data.validation 0.9999', 1, 'data.validation: 0.9999 of 200 training samples would hold out 200; it'),
    ('--data.weak hard', 1, "data.weak must be one of auto, flip_crop, crop, none; got 'hard'"),
    ('--data.strong hard', 1, 'data.strong must be one of auto, fixmatch, semifl, fedmatch, digits, none;'),
    ('--data.normalize 3', 2, 'data.normalize: expected true or false, got 3'),
    ('--data.max_train_images 0', 1, 'data.max_train_images must be a whole number of at least 1, got 0'),
    ('--data.max_train_images 5', 1, 'data.validation: 0.1 of 5 training samples would hold out 0; it must'),
    ('--data.max_test_images 0', 1, 'data.max_test_images must be a whole number of at least 1, got 0'),
    ('--data.max_test_images -1', 1, 'data.max_test_images must be a whole number of at least 1, got -1'),
    ('--data.partition Nothing', 2, 'data.partition: there is no class Nothing; there are: ClassMismatch,'),
    ('--data.partition Shards --data.partition.classes_per_client 0', 1, 'data.partition: classes_per_client must be at least 1, got 0'),
    ('--data.partition Shards --data.partition.classes_per_client 11', 1, 'data.partition: classes_per_client is 11, but the data set has only 10'),
    ('--data.partition Dirichlet --data.partition.alpha 0', 1, 'data.partition: alpha of Dirichlet must be a finite number above 0, got'),
    ('--data.partition Dirichlet --data.partition.alpha .nan', 1, 'data.partition: alpha of Dirichlet must be a finite number above 0, got'),
    ('--data.partition Dirichlet --data.partition.alpha .inf', 1, 'data.partition: alpha of Dirichlet must be a finite number above 0, got'),
    ('--data.partition Dirichlet --data.partition.min_size 0', 1, 'data.partition: min_size of Dirichlet must be at least 1, got 0'),
    ('--data.partition ClientDirichlet --data.partition.alpha -1', 1, 'data.partition: alpha of ClientDirichlet must be a finite number above'),
    ('--data.partition ClassSkew --data.partition.skew 2', 2, 'data.partition: ClassSkew takes no skew; there are: r, server_images'),
    ('--data.partition Pooled', 2, 'data.partition: Pooled needs num_clients'),
    ('--data.partition LabelsAtClients', 2, 'there is no class LabelsAtClients; did you mean FullyLabeledClients?'),
    ('--data.partition FromFile', 2, 'data.partition: FromFile needs path'),
    ('--data.partition FromFile --data.partition.path nowhere.json', 1, "partition file 'nowhere.json' does not exist; give the partition.json"),
    ('--data.partition FromFile --data.partition.path run.yaml', 1, "partition file 'run.yaml' is damaged or not a partition"),
    ('--data.partition 3', 2, 'data.partition: there is no class 3; there are: ClassMismatch,'),
    ('--data.batch_size 3', 2, 'there is no option --data.batch_size; did you mean --data.eval_batch_size?'),
    ('--data 3', 2, "data: Unable to load config '3'"),
]

COMMANDS: list[Row] = [
    ('fit --seed_everything x', 2, 'seed_everything: expected true or false or a whole number, got x'),
    ('fit --seed_everything 1.5', 2, 'seed_everything: expected true or false or a whole number, got 1.5'),
    ('fit --seed_everything -5', 1, 'seed_everything is -5: give a whole number from 0 to 4294967295'),
    ('fit --seed_everything 99999999999', 1, 'seed_everything is 99999999999: give a whole number from 0 to 4294967295'),
    ('fit --seed_everything null', 2, 'seed_everything: expected true or false or a whole number, got None'),
    ('fit --nothing 3', 2, 'there is no option --nothing; see lightning-fedssl fit --help'),
    ('train', 2, "'train' is no command; the commands are 'fit', 'validate', 'test',"),
    ('fit run.yaml', 2, 'run.yaml follows no option; give a configuration as --config run.yaml'),
    ('fit', 2, 'model: missing; give --config FILE, or --model with the name of a method'),
    ('fit --help=3', 2, "argument -h/--help: ignored explicit argument '3'"),
    ('--fit', 2, 'there is no option --fit; see lightning-fedssl fit --help'),
    ('validate --config run.yaml --data.validation 0 --model.init_from weights.pt', 1, 'data.validation is 0: there is no validation data; give a fraction'),
    ('test --config run.yaml --ckpt_path nowhere', 1, 'ckpt_path: there is no file nowhere; give the path of a .ckpt file, or'),
    ('predict --config run.yaml --ckpt_path nowhere', 1, 'ckpt_path: there is no file nowhere; give the path of a .ckpt file, or'),
    ('--config run.yaml fit', 2, 'options must follow the command: lightning-fedssl fit --config FILE'),
    ('fit fit', 2, 'fit follows no option; remove it'),
]

CHECKPOINTS: list[Row] = [
    ('--ckpt_path nowhere.ckpt', 1, 'ckpt_path: there is no file nowhere.ckpt; give the path of a .ckpt'),
    ('--ckpt_path last --trainer.default_root_dir nowhere', 1, 'ckpt_path: no run in nowhere has a last checkpoint; set'),
    ('--ckpt_path best --trainer.default_root_dir nowhere', 1, 'ckpt_path: no run in nowhere has a best checkpoint; set'),
    ('--ckpt_path .', 1, 'ckpt_path: . is a folder; give the path of a .ckpt file, or last, or'),
    ('--ckpt_path run.yaml', 1, 'ckpt_path: run.yaml holds objects other than tensors and plain values,'),
    ('--ckpt_path /dev/zero', 1, 'ckpt_path: there is no file /dev/zero; give the path of a .ckpt file,'),
    ('--ckpt_path /dev/null', 1, 'ckpt_path: there is no file /dev/null; give the path of a .ckpt file,'),
]

OTHER: list[Row] = [
    ('compare', 1, 'no suite is given: lightning-fedssl compare digits.yaml, or a file of your own;'),
    ('compare --jobs 2', 1, 'no suite is given: lightning-fedssl compare digits.yaml'),
    ('compare nowhere.yaml', 2, 'nowhere.yaml: there is no such file;'),
    ('compare digits.yaml --jobs 0', 1, '--jobs is 0: give 1 or more'),
    ('compare digits.yaml --seeds []', 1, 'digits.yaml: seeds: empty; give at least one, such as [0]'),
    ('compare digits.yaml --seeds [-1]', 1, 'digits.yaml: seeds: -1 is below 0; seeds are whole numbers from 0'),
    ('compare digits.yaml --seeds [0,0]', 1, 'digits.yaml: seeds: 0 is listed twice; give every seed once'),
    ('compare digits.yaml --target 3', 1, 'digits.yaml: target: 3.0 is not an accuracy; give a number above 0, at most'),
    ('compare digits.yaml --nothing 3', 2, 'there is no option --nothing; see lightning-fedssl compare --help'),
    ('partition --config run.yaml --data.num_clients 0', 1, 'data.num_clients must be a whole number of at least 1, got 0'),
    ('partition --config run.yaml --output run.yaml', 1, 'run.yaml: File exists; a file and a folder have the same path: give'),
    ('partition --config run.yaml --output /proc/x', 1, '/proc/x: No such file or directory; give another path'),
    ('partition --config run.yaml --plot /proc/x.png', 1, '/proc/x.png: No such file or directory; give another path'),
    ('partition --config run.yaml --plot .', 1, '--plot is .: give the name of a PNG file, such as partition.png'),
    ('partition --config run.yaml --clients x', 2, 'clients: expected a whole number, got x'),
    ('partition --config run.yaml --nothing 3', 2, 'there is no option --nothing; see lightning-fedssl partition --help'),
    ('partition nothing', 2, 'nothing follows no option; remove it'),
    ('partition --config nowhere.yaml', 2, 'nowhere.yaml: there is no such file;'),
]
# fmt: on

DEVICES = "trainer.system SystemModel --trainer.system.devices"
ON_TOP: list[Row] = [
    (f"--{DEVICES} '[{{name: a, seconds: -1}}]'", 1, "trainer.system.devices: a has seconds -1.0, std 0.0, share 1.0:"),
    (f"--{DEVICES} '[{{name: a}}]'", 2, "trainer.system.devices: Device needs seconds"),
    (f"--{DEVICES} '[{{seconds: 1}}]'", 2, "trainer.system.devices: Device needs name"),
    ("--trainer.callbacks '{class_path: FederatedCheckpoint, init_args: {every_n_rounds: 0}}'", 1,
     "FederatedCheckpoint.every_n_rounds is 0: give 1 or more"),
    ("--trainer.default_root_dir " + "x" * 300, 1, "File name too long; give a shorter path"),
    ("--model FedSHVR --data.label_location clients --model.optimizer Adam", 1,
     "model.optimizer is Adam, but Eq. 15 of Fed-SHVR's paper divides a client's movement by"),
    ("--model FedSHVR --data.label_location clients --model.optimizer SGD --model.optimizer.momentum 0.9", 1,
     "model.optimizer is SGD with momentum 0.9, but Eq. 15"),
    ("--model FedMatch --model.optimizer Adam", 1, "model.optimizer is Adam, but model.lr_patience lowers"),
    ("--model FedMatch --model.optimizer.momentum 0.5", 1, "use SGD without momentum and weight_decay"),
    ("--data.partition FromFile --data.partition.path both.json", 1, "has 18 labels at the server and 2 at the clients"),
    ("--data.partition FromFile --data.partition.path twice.json --data.num_labels 5", 1, "labels at the server and"),
]  # fmt: skip

NUMBERS: list[Row] = [
    (
        "--trainer.quarantine .nan",
        1,
        "trainer.quarantine is nan: give a factor above 1, or null to accept every update",
    ),
    ("--trainer.quarantine 1", 1, "trainer.quarantine is 1.0: give a factor above 1, or null"),
    ("--trainer.quarantine x", 2, "trainer.quarantine: expected a number, got x"),
    ("--trainer.clients_per_round 99999999999", 1, "but data.num_clients is only 5: lower the first or raise the"),
    ("--trainer.float32_matmul_precision low", 2, "expected one of highest, high, medium, got low"),
    ("--trainer.callbacks FederatedCheckpoint --trainer.callbacks.mode up", 2, "expected one of max, min, got up"),
    ("--model.optimizer.lr 1e400", 1, "model.optimizer: the learning rate is inf; give a finite number"),
    ("--model.optimizer.weight_decay .nan", 1, "model.optimizer.init_args.weight_decay is nan: give a finite number"),
    ("--model.optimizer.momentum .nan", 1, "model.optimizer.init_args.momentum is nan: give a finite number"),
    ("--model.optimizer.momentum .inf", 1, "model.optimizer.init_args.momentum is inf: give a finite number"),
    ("--model.optimizer.dampening .nan", 1, "model.optimizer.init_args.dampening is nan: give a finite number"),
    ("--model.optimizer Adam --model.optimizer.eps .nan", 1, "model.optimizer: Invalid epsilon value: nan"),
    ("--model.client_epochs 1e308", 1, "model.client_epochs is 1e+308: give a finite number above 0"),
    ("--model.server_epochs 1e308", 1, "model.server_epochs is 1e+308: give 0 (no server training) or more"),
    ("--model.mixup_alpha .nan", 1, "model.mixup_alpha is nan: give a finite number below 1e18"),
    ("--model.mixup_alpha .inf", 1, "model.mixup_alpha is inf: give a finite number below 1e18"),
    ("--model.mix_weight .nan", 1, "model.mix_weight is nan: give a finite number below 1e18"),
    ("--model.mix_weight .inf", 1, "model.mix_weight is inf: give a finite number below 1e18"),
    (
        "--model.labeling_batch_size 99999999999999999999",
        1,
        "model.labeling_batch_size is 99999999999999999999: give a",
    ),
    ("--model.schedule Cosine --model.schedule.final .inf", 1, "model.schedule.final is inf: give 0 or more;"),
    (
        "--model.schedule FractionalCosine --model.schedule.fraction .nan",
        1,
        "fraction, warmup_rounds and floor must be",
    ),
    ("--data.eval_batch_size 99999999999999999999", 1, "must be a whole number of at least 1 and below 1e18, got 9999"),
    ("--data.client_batch_size 99999999999999999999", 1, "must be a whole number of at least 1 and below 1e18, got"),
    ("--data.strong os.system", 1, "data.strong: the view fails on samples (3, 1, 8, 8): expected str, bytes"),
]
"""Numbers that are NaN, infinite or too large for any use."""

OWN_MODULE = """
from lightning.pytorch import Callback
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden: int = 8, num_classes: int = 10):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Linear(hidden, num_classes))

    def forward(self, x):
        return self.layers(x)

class Needs(Net):
    def __init__(self, hidden: int, num_classes: int = 10):
        super().__init__(hidden, num_classes)

class Pair(Net):
    def forward(self, x):
        return self.layers(x), x

def build(hidden):
    return Net(hidden)

def build_any():
    return Net()

def build_typed(hidden: int) -> nn.Module:
    return Net(hidden)

class NoNet:
    def __init__(self, hidden: int = 8): ...

class Report(Callback):
    def __init__(self, n: int = 3): ...

class View:
    def __init__(self, s: float): ...

    def __call__(self, x, keys):
        return x

def view(x, keys):
    return x
"""

OWN: list[Row] = [
    ("--model.network own.Needs", 2, "error: model.network: Needs needs hidden"),
    ("--model.network own.Net --model.network.hiden 12", 2, "Net takes no hiden; did you mean --model.network.hidden?"),
    (
        "--model.network '{class_path: own.Net, init_args: {num_classes: 10, hiden: 12}}'",
        2,
        "model.network: Net takes no hiden; did you mean hidden?",
    ),
    ("--model.network own.Net --model.network.hidden many", 2, "network.hidden: expected a whole number, got many"),
    ("--config hidden.yaml", 2, "hidden.yaml: model.network.hidden: expected a whole number, got [3]"),
    (
        "--model.network own.build",
        2,
        "build needs hidden: --model.network '{class_path: own.build, init_args: {hidden: VALUE}}'",
    ),
    ("--model.network own.build --model.network.hiden 7", 2, "model.network: build needs hidden: --model.network '{"),
    (
        "--model.network own.build_any",
        2,
        "own.build_any does not say that it returns torch.nn.Module: write def build_",
    ),
    ("--model.network '{class_path: own.build_typed}'", 2, "model.network: build_typed needs hidden"),
    (
        "--model.network '{class_path: own.build, init_args: {hiden: 7}}'",
        2,
        "model.network: build takes no hiden; did you mean hidden?",
    ),
    (
        "--model.network own.build_typed --model.network.hidden 7",
        2,
        "takes its arguments with its name: --model.network '{class_path: NAME, init_args: {hidden: VALUE}}'",
    ),
    ("--model.network own.NoNet", 2, "model.network: own.NoNet is no torch.nn.Module; there are: AlexNet, CNN,"),
    ("--model.network own.Pair", 1, "Pair gave tuple for two samples of shape (1, 8, 8), and no tensor; let forward"),
    ("--data.partition own.NoNet", 2, "data.partition: own.NoNet is no Partition; there are: ClassMismatch,"),
    ("--trainer.callbacks+=own.Report --trainer.callbacks.n x", 2, "callbacks.n: expected a whole number, got x"),
    (
        "--trainer.callbacks+=own.Report --trainer.callbacks.m 3",
        2,
        "trainer.callbacks: Report takes no m; there are: n",
    ),
    ("--data.weak own.View --data.strong none", 2, "data.weak: View needs s"),
    ("--data.weak own.View --data.strong none --data.weak.t 3", 2, "data.weak: View takes no t; there are: s"),
    ("--data.weak own.View --data.strong none --data.weak.s x", 2, "data.weak.s: expected a number, got x"),
    ("--data.weak own.view --data.strong none --data.weak.s 3", 2, "a function takes no s here: give a class whose"),
]
"""Classes and functions of a module in the working folder."""

REPLAYS: list[Row] = [
    ("fit --config run.yaml --round 3", 2, "there is no option --round; see lightning-fedssl fit --help"),
    ("predict --config run.yaml --data.predict_root nowhere --model.init_from weights.pt", 1, "nowhere"),
]

FILES: dict[str, tuple[str | bytes, str]] = {
    "empty.yaml": ("", "the file holds no keys"),
    "null.yaml": ("null\n", "the file holds no keys"),
    "list.yaml": ("- a\n", "the file holds no keys"),
    "text.yaml": ("hello\n", "the file holds no keys"),
    "tab.yaml": ("trainer:\n\tmax_rounds: 1\n", "not valid YAML, line 2, column 1"),
    "unclosed.yaml": ("trainer: {max_rounds: 1\n", "not valid YAML, line 2"),
    "two.yaml": ("trainer: {max_rounds: 1}\n---\ntrainer: {max_rounds: 2}\n", "not valid YAML, line 2"),
    "alias.yaml": ("trainer: *nothing\n", "not valid YAML, line 1, column 10: found undefined alias"),
    "merge.yaml": ("trainer: {<<: 3}\n", "not valid YAML, line 1"),
    "tag.yaml": ("trainer: !!python/object/apply:os.system ['touch ran']\n", "not valid YAML, line 1, column 10: could not"),
    "latin.yaml": ("# caf\xe9\n".encode("latin-1"), "not UTF-8 text (byte 5); save the file as UTF-8"),
    "bytes.yaml": (bytes(range(256)), "not UTF-8 text (byte 128)"),
    "utf16.yaml": ("trainer: {max_rounds: 1}\n".encode("utf-16"), "not UTF-8 text (byte 0)"),
    "twice.yaml": ("data: {num_clients: 5}\ntrainer: {}\ndata: {num_labels: 20}\n",
                   "the key data is given more than once (lines 1, 3)"),
    "inner.yaml": ("trainer:\n  max_rounds: 1\n  devices: 1\n  max_rounds: 2\n",
                   "the key max_rounds is given more than once (lines 2, 4)"),
    "below.yaml": ("data: {partition.alpha: 0.0123, partition: Dirichlet}\n",
                   "the keys partition and partition.alpha are both given, and one of them would be lost"),
    "lower.yaml": ("model: {class_path: SemiFL, init_args: {network.hidden: [3], network: MLP}}\n",
                   "the keys network and network.hidden are both given"),
    "listed.yaml": ("trainer:\n  callbacks:\n    - {class_path: A, class_path: B}\n", "the key class_path is given"),
    "bomb.yaml": ("a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)),
        "aliases (*) repeat more than 100,000 values"),
    "self.yaml": ("trainer: &a\n  callbacks: *a\n", "an alias (*) refers to a value that contains it"),
    "deep.yaml": ("a: " + "[" * 1000 + "]" * 1000, "brackets or lists are nested too deeply"),
    "numbers.yaml": ("trainer: {max_rounds: " + "9" * 5000 + "}\n", "a value cannot be read: Exceeds the limit"),
    "date.yaml": ("trainer: {max_rounds: 2020-13-45}\n", "a value cannot be read: month must be in 1..12"),
    "key.yaml": ("trainer: {max_round: 3}\n", "there is no key trainer.max_round; did you mean trainer.max_rounds?"),
    "dotted.yaml": ("trainer.max_round: 3\n", "there is no key trainer.max_round; did you mean trainer.max_rounds?"),
    "number.yaml": ("1: 2\n", "Key must be a string, got: 1"),
    "nothing.yaml": ("null: 2\n", "Key must be a string, got: None"),
    "keys.yaml": ("[1, 2]: 2\n", "not valid YAML, line 1"),
    "circle.yaml": ("config: circle.yaml\n", "Config file loop detected"),
    "folder.yaml": ("", "there is no such file"),
    "pipe.yaml": ("", "there is no such file"),
    "loop.yaml": ("", "there is no such file"),
    "/dev/zero": ("", "there is no such file"),
    "/dev/null": ("", "there is no such file"),
    "x" * 300: ("", "there is no such file"),
}  # fmt: skip
"""Configurations: content and words of the message, which begins with the file's name."""

GROUP_FILES: dict[str, tuple[str, str]] = {
    "num_client: 3": ("data", "there is no key data.num_client; did you mean data.num_clients?"),
    "num_clients: x": ("data", "data.num_clients: expected a whole number, got x"),
    "{num_clients: 3, num_clients: 4}": ("data", "the key num_clients is given more than once (lines 1, 1)"),
    "max_round: 3": ("trainer", "there is no key trainer.max_round; did you mean trainer.max_rounds?"),
    "{max_rounds: 3, max_rounds: 4}": ("trainer", "the key max_rounds is given more than once (lines 1, 1)"),
}
"""Contents of a file with one group of keys: the group, and words of the message."""

SUITES: list[Row] = [
    ("compare twice.yaml", 2, "twice.yaml: the key data is given more than once"),
    ("compare bomb.yaml", 2, "bomb.yaml: aliases (*) repeat"),
    ("compare latin.yaml", 2, "latin.yaml: not UTF-8 text"),
    ("compare pipe.yaml", 2, "pipe.yaml: there is no such file"),
    ("compare seed.yaml", 2, "seed.yaml: seeds: 3 is no list of whole numbers; give one such as [0, 1, 2]"),
    ("compare entry.yaml", 2, "entry.yaml: groups: entries: 'A' is no entry; give {label: NAME, config: FILE}"),
    ("compare group.yaml", 2, "group.yaml: groups: 'G' is no group; give {title: TEXT, entries: [...]}"),
    ("compare suite.yaml --seeds [0,0]", 1, "seeds: 0 is listed twice; give every seed once"),
    ("compare suite.yaml --jobs x", 2, "jobs: expected a whole number, got x"),
    ("compare suite.yaml --output run.yaml", 1, "Not a directory; a file and a folder have the same path"),
    (
        "compare suite.yaml --trainer.max_round 3",
        1,
        "A: there is no key trainer.max_round; did you mean trainer.max_ro",
    ),
    ("compare suite.yaml --model.optimizer.lrr 3", 1, "A: model.optimizer: SGD takes no lrr; did you mean lr?"),
    ("partition --config twice.yaml", 2, "twice.yaml: the key data is given more than once"),
]

IMAGES = {
    "text": ("a.png", "is not a readable image"),
    "empty": ("b.png", "is not a readable image"),
    "cut": ("c.png", "is not a readable image"),
    "pipe": ("d.png", "is no regular file"),
    "loop": ("e.png", "is no regular file"),
    "bomb": ("f.png", "decompression bomb"),
}
"""A broken file among the images of a folder, by kind; words of the message."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the rows run."""
    path = tmp_path_factory.mktemp("bad")
    (path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    torch.save(MLP(10, (1, 8, 8), (8,)).state_dict(), path / "weights.pt")
    suite = {"title": "A", "groups": [{"title": "G", "entries": [{"label": "A", "config": str(path / "run.yaml")}]}]}
    (path / "suite.yaml").write_text(yaml.safe_dump(suite))
    (path / "seed.yaml").write_text(yaml.safe_dump({**suite, "seeds": 3}))
    (path / "entry.yaml").write_text("title: A\ngroups: [{title: G, entries: [A]}]\n")
    (path / "group.yaml").write_text("title: A\ngroups: [G]\n")
    for name, (content, _) in FILES.items():
        if content or name == "empty.yaml":
            (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (path / "folder.yaml").mkdir()
    os.mkfifo(path / "pipe.yaml")
    (path / "loop.yaml").symlink_to("loop.yaml")
    none = torch.zeros(0, dtype=torch.int64)
    for name, labeled in (("both", torch.tensor([0, 1])), ("twice", torch.tensor([20]))):
        clients = [ClientIndices(labeled, torch.tensor([20 + k])) for k in range(5)]
        server = torch.arange(2, 20) if name == "both" else none
        FederatedSplit(
            3,
            server,
            clients
            if name == "twice"
            else [clients[0]] + [ClientIndices(none, torch.tensor([30 + k])) for k in range(4)],
        ).save(path / f"{name}.json")
    prepare_forks()
    return path


def attempt(folder: Path, arguments: list[str], before: Callable[[], object] = lambda: None) -> tuple[int, str]:
    """Exit code and output of a command in a forked process; the code is negative if a signal ended it.

    Args:
        folder: Where it runs.
        arguments: What follows the program's name.
        before: Called in the process first.
    """
    with tempfile.TemporaryFile(mode="w+") as output:
        child = os.fork()
        if child == 0:
            _run(folder, arguments, output.fileno(), before)
        status = os.waitpid(child, 0)[1]
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def _run(folder: Path, arguments: list[str], output: int, before: Callable[[], object]) -> None:
    code = 99
    try:
        os.chdir(folder)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        signal.alarm(SECONDS)
        gc.disable()  # a collection would copy the memory that is shared with the parent
        before()
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 98
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def check(folder: Path, arguments: list[str], code: int, words: str, before: Callable[[], object] = int) -> None:
    """Run a row."""
    runs = set(folder.rglob("version_*"))
    found, output = attempt(folder, arguments, before)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in output, output
    assert found == code, output
    assert len(errors) == 1, output
    assert words in errors[0]
    assert set(folder.rglob("version_*")) == runs


@pytest.mark.parametrize(
    "row", [*TRAINER, *MODEL, *OPTIMIZERS, *DATA, *CHECKPOINTS, *ON_TOP, *NUMBERS], ids=lambda row: row[0][:60]
)
def test_a_wrong_option_of_fit(folder: Path, row: Row) -> None:
    options, code, words = row
    check(folder, ["fit", "--config", "run.yaml", *shlex.split(options)], code, words)


@pytest.mark.parametrize("row", OWN, ids=lambda row: row[0][:60])
def test_a_wrong_argument_of_a_class_of_ones_own(folder: Path, row: Row) -> None:
    (folder / "own.py").write_text(OWN_MODULE)
    network = {"class_path": "own.Net", "init_args": {"hidden": [3]}}
    (folder / "hidden.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"network": network}}}))
    options, code, words = row
    check(folder, ["fit", "--config", "run.yaml", *shlex.split(options)], code, words, lambda: sys.path.insert(0, ""))


def test_a_network_is_built_by_a_function_with_arguments(folder: Path) -> None:
    """A link of the method's arguments to the data is no argument of the function."""
    (folder / "own.py").write_text(OWN_MODULE)
    network = "--model.network={class_path: own.build, init_args: {hidden: 4}}"
    arguments = ["fit", "--config", "run.yaml", "--trainer.max_rounds", "1", network]
    code, output = attempt(folder, arguments, lambda: sys.path.insert(0, ""))
    assert code == 0, output


@pytest.mark.parametrize("row", [*COMMANDS, *OTHER, *SUITES, *REPLAYS], ids=lambda row: row[0][:60])
def test_a_wrong_command(folder: Path, row: Row) -> None:
    arguments, code, words = row
    before = ["--config", "run.yaml"] if arguments.startswith("fit --") and "=" not in arguments else []
    command = shlex.split(arguments)
    check(folder, command[:1] + before + command[1:], code, words)


@pytest.mark.parametrize("name", FILES, ids=lambda name: name[:20])
def test_a_wrong_configuration_file(folder: Path, name: str) -> None:
    check(folder, ["fit", "--config", "run.yaml", "--config", name], 2, f"{name}: {FILES[name][1]}")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("content", GROUP_FILES)
def test_a_wrong_file_of_one_group(folder: Path, content: str) -> None:
    """The file is named, whether an option of the command line or a configuration file refers to it."""
    group, words = GROUP_FILES[content]
    (folder / "group.yaml").write_text(content)
    (folder / "outer.yaml").write_text(f"{group}: group.yaml\n")
    for options in ([f"--{group}", "group.yaml"], ["--config", "outer.yaml"]):
        check(folder, ["fit", "--config", "run.yaml", *options], 2, f"group.yaml: {words}")


@pytest.mark.parametrize("kind", IMAGES)
def test_a_broken_image(tmp_path: Path, folder: Path, kind: str) -> None:
    from PIL import Image

    name, words = IMAGES[kind]
    for part in ("train", "test"):
        for label in ("x", "y"):
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (8, 8), (number, 9, 9)).save(tmp_path / part / label / f"{number}.png")
    path = tmp_path / "train" / "x" / name
    whole = (tmp_path / "train" / "x" / "0.png").read_bytes()
    contents = {"text": b"no image", "empty": b"", "cut": whole[:40], "bomb": _header_of(60_000, whole)}
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(name)
    else:
        path.write_bytes(contents[kind])
    options = ["--data.dataset", "image_folder", "--data.image_size", "8", "--data.root", str(tmp_path)]
    check(folder, ["fit", "--config", "run.yaml", *options], 1, f"data.root: '{path}'")
    assert words in attempt(folder, ["fit", "--config", "run.yaml", *options])[1]


def _header_of(side: int, png: bytes) -> bytes:
    """A PNG file that claims to have another size."""
    import struct
    import zlib

    header = b"IHDR" + struct.pack(">II", side, side) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


def test_there_are_at_least_250_rows() -> None:
    rows: list[Any] = [
        *TRAINER,
        *MODEL,
        *OPTIMIZERS,
        *DATA,
        *CHECKPOINTS,
        *ON_TOP,
        *NUMBERS,
        *REPLAYS,
        *COMMANDS,
        *OTHER,
        *SUITES,
        *FILES,
        *GROUP_FILES,
        *IMAGES,
    ]
    assert len(rows) >= 250


def _limit(size: int) -> None:
    """Let every file of this process end at a number of bytes, as on a full disk."""
    sys.dont_write_bytecode = True  # bytecode that ends early would break the imports of other processes
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_is_named(tmp_path: Path, folder: Path) -> None:
    """A file of 20 kB holds the configuration, but no checkpoint."""
    options = ["--model.network.hidden", "[200]", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    arguments = ["fit", "--config", "run.yaml", *options, "--trainer.default_root_dir", str(tmp_path)]
    code, output = attempt(folder, arguments, lambda: _limit(20_000))
    assert code == 1, output
    assert "Traceback" not in output
    assert "File too large; free some space, or set trainer.default_root_dir" in output
    assert not list(tmp_path.rglob("*.ckpt*"))


def test_the_remedy_for_a_full_disk_fits_export(tmp_path: Path, folder: Path) -> None:
    """Export has an output folder of its own, and nothing to resume."""
    options = ["--trainer.max_rounds", "1", "--trainer.default_root_dir", str(tmp_path)]
    assert attempt(folder, ["fit", "--config", "run.yaml", *options])[0] == 0
    arguments = ["export", "--ckpt_path", "last", "--default_root_dir", str(tmp_path)]
    code, output = attempt(folder, arguments, lambda: _limit(1000))
    assert code == 1, output
    assert output.rstrip().endswith("File too large; free some space, or give a folder on another disk as --output")
