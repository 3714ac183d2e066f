"""The loop over a stack of blocks, and the base class of the models built on one."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kalman_attention._typing import Mask
from kalman_attention.losses import marginal_nll, posterior_mean_cross_entropy
from kalman_attention.models.block import Block, BlockOutput
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.scaffold import Encoder, make_decoder, make_encoder
from kalman_attention.models.vocabulary import Embedding, Head, require_tokens
from kalman_attention.nn.decoding import project
from kalman_attention.nn.norms import RMSNorm
from kalman_attention.nn.readout import Readout

States = tuple[Any, ...]
Visit = Callable[[Block, BlockOutput], None]


def walk(
    blocks: Sequence[Block],
    x: Tensor,
    states: Sequence[Any] | None = None,
    *,
    mask: Mask | None = None,
    cu_seqlens: Tensor | None = None,
    return_variance: bool = False,
    sample: bool = False,
    generator: torch.Generator | None = None,
    hold: bool = False,
    ids: Tensor | None = None,
    keep: Mask | None = None,
    visit: Visit | None = None,
    call: Callable[..., BlockOutput] | None = None,
) -> BlockOutput:
    """Run all blocks in order; the only loop over blocks in the library.

    Args:
        blocks: the blocks of the model.
        x: input of the first block, ``[B, T, d_model]``; or one token per row, ``[B, d_model]``,
            which needs states.
        states: one per block; None for the initial states.
        mask: ``[B, T]`` or ``[B]`` bool, False for padding.
        cu_seqlens: document boundaries in one packed row (B = 1), ``[n + 1]`` int.
        return_variance: also compute the variances of the read-outs.
        sample: pass on posterior samples between blocks; the last block passes on its mean.
        generator: source of randomness.
        hold: stop at the posterior of the last block.
        ids: ``[B, T]`` int; x is then a table ``[V, d_model]`` of which they name the rows.
        keep: ``[B, T]`` bool; the result is then ``[1, n, d_model]``, these n positions only.
        visit: called with every block and its output, before the next block runs.
        call: how to call a block, such as through activation checkpointing; called with the block
            and its arguments. Not used for a block that holds, whose output is not recomputed.

    Returns:
        The residual stream after the last block, the tuple of all states, and the read-out of the
        last block, whose state is that tuple, with ``hold``; otherwise None.
    """
    if x.dim() == 2 and ids is None and states is None:
        raise ValueError(
            "a single token per row needs states: pass those of the previous call, or "
            "init_states(batch_size). A prompt is a sequence: tokens [B, T]."
        )
    last, new = len(blocks) - 1, []
    readout: Readout | None = None
    for i, (block, state) in enumerate(zip(blocks, _matching(states, blocks), strict=True)):
        held = hold and i == last
        run = block if call is None or held else partial(call, block)
        found = BlockOutput(  # rebuilt, because checkpointing may return a plain tuple
            *run(
                x,
                state,
                mask,
                cu_seqlens,
                return_variance=return_variance,
                sample=sample and i < last,
                generator=generator,
                hold=held,
                ids=ids if i == 0 else None,
                keep=keep if i == last else None,
            )
        )
        if visit is not None:
            visit(block, found)
        x, readout = found.y, found.readout
        new.append(found.state)
    if not hold or readout is None:
        return BlockOutput(x, tuple(new), None)
    return BlockOutput(x, tuple(new), readout._replace(state=tuple(new)))


class Variances(list[Tensor | None]):
    """A visitor that collects the posterior variance of every block; None for one without."""

    def __call__(self, block: Block, found: BlockOutput) -> None:
        """Look at one block."""
        self.append(None if found.readout is None else found.readout.variance)


class BlockStack(nn.Module):
    """Embedding, encoder, blocks, decoder, norm and head: the base of all native models.

    Args:
        options: vocabulary, widths, blocks and scaffold.
        decoder_widths: hidden widths of the decoder.
        head_bias: whether the head has a bias.
    """

    def __init__(
        self, options: LanguageModelConfig, decoder_widths: tuple[int, ...], head_bias: bool
    ) -> None:
        super().__init__()
        width, eps = (options.d_model, *decoder_widths)[-1], options.norm_eps
        self.options = options
        self.gradient_checkpointing = False
        self.embedding = Embedding(options.vocab_size, options.d_model)
        self.encoder = make_encoder(options)
        self.blocks = nn.ModuleList(Block(options, mixer) for mixer in options.layers)
        self.decoder = make_decoder(options.d_model, decoder_widths, eps)
        self.norm = RMSNorm(width, eps)
        self.head = Head(width, options.vocab_size, bias=head_bias)

    def stack(self) -> list[Block]:
        """The blocks, in order."""
        return list(self.blocks)  # type: ignore[arg-type]

    def num_parameters(self) -> int:
        """Number of parameters, each counted once."""
        return sum(p.numel() for p in self.parameters())

    def init_states(self, batch_size: int, *, capacity: int = 0) -> States:
        """One state per block, before the first token.

        Args:
            batch_size: number of sequences.
            capacity: number of tokens that will follow; attention blocks preallocate memory for it.
        """
        like = self.norm.weight
        return tuple(
            block.mixer.init_state(batch_size, capacity=capacity, like=like)
            for block in self.stack()
        )

    def reserve(self, states: States, capacity: int) -> States:
        """A copy of the states with room for ``capacity`` more tokens; the originals are kept.

        ``forward`` and ``read`` never write into the states they are given, unless memory was
        preallocated by ``init_states(..., capacity=n)`` or by this method, which makes attention
        decode in place. To keep a state that decodes in place, keep ``reserve(states, 0)``.
        """
        pairs = zip(self.stack(), states, strict=True)
        return tuple(block.mixer.reserve(state, capacity) for block, state in pairs)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Input of the first block for tokens, ``[..., d_model]``, in the dtype of the blocks."""
        dtype = self.norm.weight.dtype
        if isinstance(self.encoder, Encoder):
            return self.encoder.look_up(self.embedding.weight.to(dtype), input_ids)
        same = self.embedding.weight.dtype == dtype  # then any nn.Embedding works
        found: Tensor = self.embedding(input_ids) if same else self.embedding(input_ids, dtype)
        return found

    def decode(self, x: Tensor) -> Tensor:
        """Input of the head from the stream after the last block (``ModelOutput.hidden``)."""
        hidden: Tensor = self.norm(self.decoder(x))
        return hidden

    def head_logits(self, x: Tensor) -> Tensor:
        """Logits from the input of the head (``ModelOutput.hidden``)."""
        logits = project(self.head, x)
        cap = self.options.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def logits(self, x: Tensor) -> Tensor:
        """Logits from the residual stream after the last block, ``[..., d_model]``."""
        return self.head_logits(self.decode(x))

    def write(self, latent: Tensor, *context: Tensor) -> Tensor:
        """Logits from read-outs of the last block, ``[..., T, d_inner]``: the decoder of KLA+.

        Args:
            latent: the posterior mean of ``read``, or samples of it.
            *context: ``Readout.context`` of the output of ``read``.

        Returns:
            ``[..., T, vocab_size]``.
        """
        return self.logits(self.stack()[-1].resume(latent, *context))

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        *,
        kind: Literal["mean", "marginal"] = "mean",
        num_samples: int = 10,
        generator: torch.Generator | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        chunk_size: int | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Training loss of the predictions for ``targets``.

        Args:
            input_ids: ``[B, T]``.
            targets: ``[B, T]``, the tokens after ``input_ids`` (for an autoencoder the tokens
                themselves); positions with ``ignore_index`` do not count.
            kind: ``"mean"``, cross-entropy of the posterior mean, or ``"marginal"``, the negative
                log marginal likelihood (KLA+), which also trains the variances.
            num_samples: number of posterior samples for the marginal likelihood.
            generator: source of randomness.
            mask: as for ``forward``.
            cu_seqlens: as for ``forward``.
            chunk_size: positions decoded at a time; None for a default that bounds memory.
            ignore_index: target that does not count.
            reduction: ``"mean"`` over the positions that count, or their ``"sum"``.

        Returns:
            The loss, in nats.
        """
        if kind not in ("mean", "marginal"):
            raise ValueError(f"kind must be 'mean' or 'marginal', got {kind!r}.")
        keep = targets != ignore_index
        # Few positions count in some tasks; otherwise picking them costs more than it saves.
        few = len(self.decoder) and 2 * int(keep.sum()) < keep.numel()
        found = self._run(
            input_ids,
            mask=mask,
            cu_seqlens=cu_seqlens,
            hold=kind == "marginal",
            keep=keep if few else None,
        )
        options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        if few:
            targets = targets[keep].unsqueeze(0)
        if found.readout is not None:
            return read_loss(
                self.write,
                found.readout,
                targets,
                num_samples=num_samples,
                generator=generator,
                chunk_size=chunk_size,
                **options,
            )
        chunk_size = (chunk_size or 512) * (len(input_ids) if few else 1)
        return posterior_mean_cross_entropy(
            self.logits, found.y, targets, chunk_size=chunk_size, **options
        )

    def _run(self, input_ids: Tensor, **options: Any) -> BlockOutput:
        """Tokens through the blocks; with ``hold``, up to the posterior that ``write`` takes."""
        short = len(self.embedding.weight) < input_ids.numel()
        if isinstance(self.encoder, Encoder) and short and options.get("mask") is None:
            require_tokens(input_ids, len(self.embedding.weight))
            table = self.encoder(self.embedding.weight.to(self.norm.weight.dtype))
            return self.walk(table, ids=input_ids, **options)
        return self.walk(self.embed(input_ids), **options)

    def walk(self, x: Tensor, states: States | None = None, **options: Any) -> BlockOutput:
        """Run the blocks of this model, see ``walk``; subclasses may override it.

        Args:
            x: input of the first block, as from ``embed``.
            states: one per block; None for the initial states.
            **options: further options of the function ``walk``.
        """
        call = None
        single = x.dim() == 2 and options.get("ids") is None
        if self.gradient_checkpointing and torch.is_grad_enabled() and not single:
            call = partial(checkpoint, use_reentrant=False)
        sample = self.options.between_blocks == "sample"
        return walk(self.stack(), x, states, sample=sample, call=call, **options)


def read_loss(
    write: Callable[..., Tensor], read: Readout, targets: Tensor, **options: Any
) -> Tensor:
    """Negative log marginal likelihood of targets given a read-out; options as ``marginal_nll``."""
    assert read.variance is not None
    return marginal_nll(write, read.mean, read.variance, targets, context=read.context, **options)


def _matching(states: Sequence[Any] | None, blocks: Sequence[Block]) -> Iterable[Any]:
    if states is None:
        return (None,) * len(blocks)
    if len(states) != len(blocks):
        raise ValueError(
            f"states has {len(states)} entries but the model has {len(blocks)} blocks: pass one "
            "state per block, as in ModelOutput.states or from init_states(batch_size)."
        )
    return states
