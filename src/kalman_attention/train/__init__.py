"""Training: parameter groups, schedules, data with a cursor, checkpoints, the loop."""

from kalman_attention.train.checkpoint import CheckpointError as CheckpointError
from kalman_attention.train.config import TrainConfig as TrainConfig
from kalman_attention.train.data import Batches as Batches
from kalman_attention.train.data import StreamBatches as StreamBatches
from kalman_attention.train.data import TensorBatches as TensorBatches
from kalman_attention.train.loop import fit as fit
from kalman_attention.train.metrics import Best as Best
from kalman_attention.train.metrics import Result as Result
from kalman_attention.train.metrics import read_metrics as read_metrics
from kalman_attention.train.nonfinite import NonFiniteError as NonFiniteError
from kalman_attention.train.objective import token_evaluation as token_evaluation
from kalman_attention.train.objective import token_loss as token_loss
from kalman_attention.train.optim import flat_groups as flat_groups
from kalman_attention.train.optim import param_groups as param_groups
from kalman_attention.train.snapshot import load_weights as load_weights
