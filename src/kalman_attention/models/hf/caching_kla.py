"""The state of a model between calls, as layers of transformers' own ``Cache``.

A ``Cache`` is a list of layers, and everything that ``generate`` does to a cache is passed on to
its layers. So there is no cache class here, only layers, which ``adopt`` substitutes for the
generic ones before their first use: two kinds for a ``DynamicCache``, and the same two with tensors
of fixed shape and address for a ``StaticCache``, for compiled decoding. transformers'
``LinearAttentionLayer`` is not used because

- it initialises and resets states to zeros. A state of variance 0 would mean certainty that no
  evidence can change; ours is initialised from the prior. Here "no state yet" is None, and the
  model fills in its prior.
- it concatenates and cuts the convolution window itself, which padding on the right would corrupt.
  Here the mixer passes the window it computed.
- it writes in place, which breaks a backward pass through a carried state. Here tensors are
  replaced, and overwritten only in a static cache.
- it cannot repeat or select rows, or report how many tokens it has seen.

Attention keeps keys and values where ``DynamicLayer`` keeps them, together with the positions of
padding, so that a later call need not repeat the mask of an earlier one.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
)

from kalman_attention.baselines.attention import Attention, AttentionState
from kalman_attention.nn.mixer import map_state, state_tensors


class StateCacheLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """The state of one block with a memory of fixed size, such as KLA or Mamba.

    ``state`` is what the mixer returned, a named tuple of tensors whose first axis is the batch, in
    the dtypes it chose; None before the first token.
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
        """The state to continue from; None before the first token, which means the prior."""
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
        """Let every row continue from the beam it was chosen from."""
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
                "a state cannot be taken back to an earlier token, because it keeps no history. "
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
        """Does nothing: the first ``write`` sets the whole state."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: this layer has no keys and values."""
        raise ValueError("this block has no keys and values; its model calls read and write.")

    update_conv_state = update
    update_recurrent_state = update

    def _mark(self, filled: bool) -> None:
        self.is_initialized = filled
        self.has_previous_state = {0: filled}


class StaticStateCacheLayer(StateCacheLayer):
    """The same with tensors that keep their address, as a compiled step requires."""

    is_compileable = True

    def __init__(self) -> None:
        super().__init__()
        self.length: Any = torch.tensor(0)  # a number would be compiled into the step

    def write(self, state: Any, tokens: int) -> None:
        """Copy the state after ``tokens`` more positions, padding included."""
        if self.state is None:
            self.state = map_state(_at_home, state)
            _, first = next(state_tensors(state))
            self.device, self.dtype = first.device, first.dtype
            self.length = _at_home(self.length.to(first.device))
            self._mark(True)
        else:
            _overwrite(self.state, state)
        self.length.add_(tokens)

    def reset(self) -> None:
        """Forget everything: the next token starts from the prior."""
        self.state = None
        self.length.zero_()
        self._mark(False)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows; in place if their number does not change."""
        old = self.state
        super().batch_select_indices(indices)
        if old is not None and self.rows() == len(next(state_tensors(old))[1]):
            _overwrite(old, self.state)
            self.state = old

    def rows(self) -> int:
        """Number of sequences in the cache."""
        return len(next(state_tensors(self.state))[1])


class AttentionCacheLayer(DynamicLayer):
    """Keys and values of one attention block, and which positions hold a token."""

    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self.real: Tensor | None = None

    def read(self) -> AttentionState | None:
        """The state to continue from; None before the first token."""
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
        # Without super(): some releases of transformers keep zeros of the same length.
        self.keys, self.values, self.real = None, None, None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let every row continue from the beam it was chosen from."""
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
        """Drop the last ``-tokens_to_remove`` positions."""
        super().crop(tokens_to_remove)
        if self.is_initialized:
            self._rows(lambda real: real[:, : self.keys.shape[2]])

    def _rows(self, change: Any) -> None:
        self.real = None if self.real is None else change(self.real)


class StaticAttentionCacheLayer(StaticLayer):
    """Keys and values of one attention block, preallocated for a fixed number of tokens.

    Args:
        max_cache_len: number of tokens.
    """

    state: AttentionState | None
    keys: Any
    values: Any

    def __init__(self, max_cache_len: int) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.state = None

    def read(self) -> AttentionState | None:
        """The state to continue from; None before ``prepare`` has allocated memory."""
        return self.state

    def prepare(self, mixer: Attention, x: Tensor) -> None:
        """Allocate memory for tokens like ``[B, T, d_model]``, before the first one."""
        if self.state is not None:
            self._check_room(x.shape[1])
            return
        found = mixer.init_state(x.shape[0], capacity=self.max_cache_len, like=x)
        self.lazy_initialization(found.keys[:, :, :0], found.values[:, :, :0])
        real = torch.zeros(x.shape[0], self.max_cache_len, dtype=torch.bool, device=x.device)
        self.state = AttentionState(
            self.keys, self.values, _at_home(real), _at_home(found.seen), self.cumulative_length
        )
        self._check_room(x.shape[1])

    def _check_room(self, tokens: int) -> None:
        on_host = self.cumulative_length.device.type == "cpu"
        if torch.compiler.is_compiling() or not on_host:
            return  # reading the value would break the graph, or wait for the device
        filled = int(self.cumulative_length)
        if filled + tokens > self.max_cache_len:
            raise ValueError(
                f"the cache has room for {self.max_cache_len} tokens: it holds {filled} and "
                f"{tokens} more do not fit. Create it with a larger max_cache_len."
            )

    def write(self, state: AttentionState, tokens: int) -> None:
        """Keep the state after ``tokens`` more positions; keys and values are in place already."""
        assert self.state is not None
        assert isinstance(self.state.length, Tensor)
        self.state.seen.copy_(state.seen)
        self.state.length.add_(tokens)

    def reset(self) -> None:
        """Forget everything, in place."""
        super().reset()
        if self.state is not None and self.state.real is not None:
            self.state.real.zero_()
            self.state.seen.zero_()
            self.cumulative_length.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let every row continue from the beam it was chosen from."""
        if self.state is not None:
            for x in (self.keys, self.values, self.state.real, self.state.seen):
                assert x is not None
                x.copy_(x.index_select(0, beam_idx.to(x.device)))


def _at_home(x: Tensor) -> Tensor:
    """A copy with a fixed address, which the compiler may rely on."""
    x = x.clone()
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(x)
    return x


def _overwrite(old: Any, new: Any) -> None:
    for (_, here), (_, there) in zip(state_tensors(old), state_tensors(new), strict=True):
        here.copy_(there)


def adopt(cache: Any, mixers: tuple[str, ...]) -> Cache:
    """Put our layers into an empty cache; a cache that already has them is left unchanged.

    Args:
        cache: a ``DynamicCache``, made with or without the configuration, or a ``StaticCache``.
        mixers: mixers of the configuration.

    Returns:
        The same object.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"past_key_values must be a transformers Cache, got {type(cache)}.")
    own = (StateCacheLayer, AttentionCacheLayer, StaticAttentionCacheLayer)
    if len(cache.layers) == len(mixers) and all(isinstance(x, own) for x in cache.layers):
        return cache
    if (
        not isinstance(cache, DynamicCache | StaticCache)
        or cache.offloading
        or not all(map(_empty, cache.layers))
    ):
        raise ValueError(
            f"a KLA model cannot use this {type(cache).__name__}: it must be empty, of the default "
            "kind or static, neither quantized nor offloaded. (A state has a fixed size anyway.) "
            "Leave past_key_values and cache_implementation out, or pass a new "
            "DynamicCache(config=model.config)."
        )
    cache.layer_class_to_replicate = None
    if isinstance(cache, StaticCache):
        room = max(getattr(layer, "max_cache_len", 0) for layer in cache.layers)
        cache.layers = [
            StaticAttentionCacheLayer(room) if mixer == "attention" else StaticStateCacheLayer()
            for mixer in mixers
        ]
    else:
        cache.layers = [
            AttentionCacheLayer() if mixer == "attention" else StateCacheLayer() for mixer in mixers
        ]
    return cache


def _empty(layer: Any) -> bool:
    """Whether a layer is one of the generic ones and has not been used."""
    if type(layer) is LinearAttentionLayer:
        return not any(layer.has_previous_state.values())
    return type(layer) in (DynamicLayer, StaticLayer) and not layer.is_initialized
