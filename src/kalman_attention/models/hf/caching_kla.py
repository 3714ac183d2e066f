"""What a model remembers between calls, as layers of transformers' own ``Cache``.

A ``DynamicCache`` is a list of layers, and everything that ``generate`` does to a cache goes to
the layers. So there is no cache class here, only two layers, which ``adopt`` puts in place of the
generic ones before their first use. Why not transformers' ``LinearAttentionLayer`` itself:

- It starts and resets states to zeros. A belief of variance 0 is certainty that nothing can move;
  ours starts from the prior. Here "no state yet" is None, and the model fills in its prior.
- It joins and cuts the convolution window itself, which padding on the right would corrupt. Here
  the mixer hands over the window it computed.
- It writes in place, which breaks a backward pass through a carried state. Here tensors are
  replaced, never overwritten.
- It cannot repeat or select rows, nor say how many tokens it has seen.

Attention keeps keys and values where ``DynamicLayer`` keeps them, and beside them which places
hold padding, so that a later call need not repeat the mask of an earlier one.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kalman_attention.baselines.attention import AttentionState
from kalman_attention.nn.mixer import map_state, state_tensors


class StateCacheLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """The state of one block whose memory has a fixed size: KLA, Mamba and their like.

    ``state`` is whatever the mixer returned, a named tuple of tensors with rows first, in the
    dtypes it chose; None before the first token.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = False

    state: Any

    def __init__(self) -> None:
        CacheLayerMixin.__init__(self)
        LinearAttentionCacheLayerMixin.__init__(self)
        self.length = 0
        self.state = None

    def read(self) -> Any:
        """The state to go on from; None before the first token, which means the prior."""
        return self.state

    def write(self, state: Any, tokens: int) -> None:
        """Keep the state after ``tokens`` more positions, padding included."""
        self.state = state
        _, first = next(state_tensors(state))
        self.device, self.dtype = first.device, first.dtype
        self.length += tokens
        self._mark(True)

    def reset(self) -> None:
        """Forget everything: the next token starts from the prior."""
        self.state, self.length = None, 0
        self._mark(False)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let every row go on from the beam it was chosen from."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.state = map_state(lambda x: x.repeat_interleave(repeats, 0), self.state)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self.state = map_state(lambda x: x.index_select(0, indices.to(x.device)), self.state)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: an update of the state cannot be undone."""
        if tokens_to_remove:
            raise ValueError(
                "a state cannot be taken back to an earlier token: it keeps no history. "
                "Keep copy.deepcopy(cache) from before, or run the shorter sequence again."
            )

    def get_seq_length(self) -> int:
        """Positions seen so far, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over all positions."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def activate_past_recording(self) -> None:
        """Refused, like ``crop``."""
        self.crop(-1)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the first ``write`` brings a whole state."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: this layer has no keys and values."""
        raise ValueError("this block has no keys and values; its model calls read and write.")

    update_conv_state = update
    update_recurrent_state = update

    def _mark(self, filled: bool) -> None:
        self.is_initialized = filled
        self.has_previous_state = {0: filled}


class AttentionCacheLayer(DynamicLayer):
    """Keys and values of one attention block, and which of their places hold a token."""

    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self.real: Tensor | None = None

    def read(self) -> AttentionState | None:
        """The state to go on from; None before the first token."""
        if not self.is_initialized:
            return None
        length, rows = self.keys.shape[2], self.keys.shape[0]
        if self.real is None:
            seen = torch.full((rows,), length, device=self.keys.device)
        else:
            seen = self.real.sum(1)
        return AttentionState(self.keys, self.values, self.real, seen, length)

    def write(self, state: AttentionState, tokens: int) -> None:
        """Keep the state after ``tokens`` more positions, padding included."""
        self.keys, self.values, self.real = state.keys, state.values, state.real
        self.device, self.dtype = state.keys.device, state.keys.dtype
        self.is_initialized = True

    def reset(self) -> None:
        """Forget everything."""
        # By hand: some releases of transformers keep zeros of the same length.
        self.keys, self.values, self.real = None, None, None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let every row go on from the beam it was chosen from."""
        super().reorder_cache(beam_idx)
        self._rows(lambda real: real.index_select(0, beam_idx.to(real.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        self._rows(lambda real: real.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)
        self._rows(lambda real: real[indices.to(real.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` places."""
        super().crop(tokens_to_remove)
        if self.is_initialized:
            self._rows(lambda real: real[:, : self.keys.shape[2]])

    def _rows(self, change: Any) -> None:
        self.real = None if self.real is None else change(self.real)


def adopt(cache: Any, mixers: tuple[str, ...]) -> Cache:
    """Put our layers into a cache that is still empty; a cache of ours is left as it is.

    Args:
        cache: a ``DynamicCache``, made with or without the model's configuration.
        mixers: of the configuration.

    Returns:
        The same object.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"past_key_values must be a transformers Cache, got {type(cache)}.")
    own = (StateCacheLayer, AttentionCacheLayer)
    if len(cache.layers) == len(mixers) and all(isinstance(x, own) for x in cache.layers):
        return cache
    if (
        not isinstance(cache, DynamicCache)
        or cache.offloading
        or not all(map(_empty, cache.layers))
    ):
        raise ValueError(
            f"a KLA model cannot use this {type(cache).__name__}: it must be empty and of the "
            "default kind, neither static, quantized nor offloaded. (A belief has a fixed size "
            "anyway.) Leave past_key_values and cache_implementation out, or pass a new "
            "DynamicCache(config=model.config)."
        )
    cache.layer_class_to_replicate = None
    cache.layers = [
        AttentionCacheLayer() if mixer == "attention" else StateCacheLayer() for mixer in mixers
    ]
    return cache


def _empty(layer: Any) -> bool:
    """Whether a layer is one of the generic dynamic ones and has not been used."""
    if type(layer) is LinearAttentionLayer:
        return not any(layer.has_previous_state.values())
    return type(layer) is DynamicLayer and not layer.is_initialized
