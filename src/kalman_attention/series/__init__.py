"""Classical models of series: fit, filter, smooth and forecast with exact bands.

``StateSpace("level + cycle").fit(y, times)`` fits a sum of latent processes by maximum likelihood.
Values may have any spacing, and any of them may be missing. Models with a single latent are
filtered by ``kla_scan`` itself.
"""

from kalman_attention.series.components import AR1 as AR1
from kalman_attention.series.components import OU as OU
from kalman_attention.series.components import Component as Component
from kalman_attention.series.components import Cycle as Cycle
from kalman_attention.series.components import Level as Level
from kalman_attention.series.components import Trend as Trend
from kalman_attention.series.estimate import Estimate as Estimate
from kalman_attention.series.model import StateSpace as StateSpace
from kalman_attention.series.nile import NILE as NILE
from kalman_attention.series.nile import NILE_YEARS as NILE_YEARS
from kalman_attention.series.results import FittedSeries as FittedSeries
