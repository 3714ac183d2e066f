"""Training on many processes: data parallelism, sharded weights, sequences split over ranks."""

from kalman_attention.parallel.context import RankContext as RankContext
from kalman_attention.parallel.context import split_sequences as split_sequences
from kalman_attention.parallel.ranks import Kind as Kind
from kalman_attention.parallel.ranks import Parallel as Parallel
from kalman_attention.parallel.ranks import from_environment as from_environment
from kalman_attention.parallel.shared_loss import SummedLoss as SummedLoss
