"""Speed and memory on this machine: what ``kla bench`` measures.

============  ==========================================================================
``scan``      the engines: times and memory over sequence length, and goals
``layer``     the layer against its own matrix products, attention and Mamba
``mixers``    all mixers at equal width and state, and public implementations on CPU
``decode``    time per decoded token
``tasks``     one training update of every model of an experiment
``gpu``       a report on the engines of a GPU
``options``   what each of them takes, with defaults
``measure``   how times and memory are measured
============  ==========================================================================
"""

from kalman_attention.benchmarks.options import DecodeOptions as DecodeOptions
from kalman_attention.benchmarks.options import LayerOptions as LayerOptions
from kalman_attention.benchmarks.options import MixerOptions as MixerOptions
from kalman_attention.benchmarks.options import SweepOptions as SweepOptions
from kalman_attention.benchmarks.options import TaskOptions as TaskOptions
