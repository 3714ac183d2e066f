"""Options of the benchmarks. Without torch, so that ``kla bench --help`` can show the defaults."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kalman_attention.recipes.experiment import Scale


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Sizes of a sweep over sequence length. The defaults are those of the paper's figures.

    Attributes:
        lengths: sequence lengths, T.
        batch: sequences, B.
        channels: channels, D.
        slots: slots, N.
        patience: seconds of one pass after which an engine gives up.
    """

    lengths: Sequence[int] = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
    batch: int = 1
    channels: int = 960
    slots: int = 16
    patience: float = 20.0


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options of ``bench_layer``.

    Attributes:
        lengths: sequence lengths.
        batch: sequences.
        width: ``d_model``.
        state: ``d_state`` of KLA and of Mamba.
        threads: number of PyTorch threads; None leaves it as it is.
        repeats: maximum number of rounds.
        seconds: approximate time for all rounds of a length.
        mamba_up_to: longest sequence for Mamba of transformers.
        value: where the values of KLA come from.
        precision_rank: rank of the projection to the value precision; None for full rank.
    """

    lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16_384)
    batch: int = 1
    width: int = 960
    state: int = 16
    threads: int | None = None
    repeats: int = 10
    seconds: float = 20.0
    mamba_up_to: int = 512
    value: Literal["stream", "project"] = "stream"
    precision_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class MixerOptions:
    """Options of ``bench_mixers``.

    Attributes:
        lengths: sequence lengths.
        batch: sequences.
        width: ``d_model``, a multiple of 4 x ``state``.
        state: ``d_state`` of KLA; the other mixers get a state of the same size.
        threads: number of PyTorch threads; None leaves it as it is.
        mixers: names of the mixers; None for all whose state size can be matched.
        repeats: maximum number of rounds.
        seconds: approximate time for all rounds of a length.
        patience: seconds of one call after which a mixer gives up.
        rivals_at: sequence lengths for public implementations.
        rivals_backward_up_to: longest of them that is also differentiated.
        rival_repeats: maximum number of rounds with public implementations.
    """

    lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192)
    batch: int = 1
    width: int = 512
    state: int = 16
    threads: int | None = None
    mixers: Sequence[str] | None = None
    repeats: int = 10
    seconds: float = 20.0
    patience: float = 60.0
    rivals_at: Sequence[int] = (512, 2048)
    rivals_backward_up_to: int = 512
    rival_repeats: int = 1


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Options of ``bench_decode``.

    Attributes:
        contexts: context lengths.
        tokens: tokens decoded per measurement.
        batch: sequences.
        width: ``d_model``.
        state: ``d_state`` of KLA.
        threads: number of PyTorch threads; None leaves it as it is.
        depth: blocks.
        preset: language model, with random weights, whose time is compared with the time that
            reading its weights takes.
        repeats: maximum number of rounds.
        seconds: approximate time for all contexts; the preset takes a quarter of it in addition.
    """

    contexts: Sequence[int] = (128, 512, 2048, 4096, 8192, 16_384)
    tokens: int = 8
    batch: int = 1
    width: int = 512
    state: int = 16
    threads: int | None = None
    depth: int = 4
    preset: str = "kla-45m"
    repeats: int = 40
    seconds: float = 60.0


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options of ``bench_tasks``.

    Attributes:
        experiment: an experiment of ``kla reproduce`` on synthetic tasks.
        scale: its scale.
        only: labels of the runs to time, such as ``"kla/compression"``; None for all.
        repeats: maximum number of rounds.
        seconds: approximate time for all rounds of a task.
    """

    experiment: str = "mad"
    scale: Scale = "cpu"
    only: str | None = None
    repeats: int = 40
    seconds: float = 10.0


def settings(
    subject: str, options: LayerOptions | MixerOptions | DecodeOptions | TaskOptions
) -> dict[str, Any]:
    """What a result file says about how it was measured; options that are None are left out."""
    given = {name: value for name, value in asdict(options).items() if value is not None}
    return {"subject": subject, **given}
