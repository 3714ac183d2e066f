"""The frame of the mixers whose state is a matrix per head: masks, packing, steps."""

from typing import Any

from torch import Tensor

from kalman_attention._typing import Mask
from kalman_attention.nn.mixer import LayerOutput, Mixer
from kalman_attention.nn.packing import mix_documents


class MatrixMixer(Mixer):
    """A mixer that is written once, for rows with padding; packing and steps follow from it."""

    def mix(
        self,
        x: Tensor,
        state: Any = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        return_variance: bool = False,
    ) -> LayerOutput:
        """Mix a piece of sequences, going on from ``state``; see ``Mixer``. No variance."""
        self._check(x, mask, cu_seqlens)
        if cu_seqlens is not None:
            return mix_documents(self.mix, x, state, cu_seqlens)
        return self._rows(x, state, mask, parallel=True)

    def step(
        self, x: Tensor, state: Any, *, mask: Mask | None = None, return_variance: bool = False
    ) -> LayerOutput:
        """One token ``[B, d_model]`` (mask ``[B]``); equal to ``mix`` on sequences of one."""
        self._check(x, mask, axes=2)
        mask = None if mask is None else mask.unsqueeze(1)
        found = self._rows(x.unsqueeze(1), state, mask, parallel=False)
        return LayerOutput(found.y.squeeze(1), None, found.state)

    def _rows(self, x: Tensor, state: Any, mask: Mask | None, *, parallel: bool) -> LayerOutput:
        state = self.init_state(x.shape[0], like=x) if state is None else state
        blank = None if mask is None else ~mask.unsqueeze(-1)
        if blank is not None:
            x = x.masked_fill(blank, 0.0)  # whatever stands in padding, even NaN
        y, state = self._mix(x, state, mask, parallel=parallel)
        return LayerOutput(y if blank is None else y.masked_fill(blank, 0.0), None, state)

    def _mix(
        self, x: Tensor, state: Any, mask: Mask | None, *, parallel: bool
    ) -> tuple[Tensor, Any]:
        """Output and new state for rows whose padding is 0; what comes out there is ignored."""
        raise NotImplementedError
