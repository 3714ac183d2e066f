"""Run by every rank: a split sequence gives the values and gradients of the whole one."""

import itertools

import torch
from torch import Tensor

from kalman_attention import KLA, KLAConfig, KLAState, kla_scan_ref
from kalman_attention.parallel.context import RankContext, split_sequences
from kalman_attention.parallel.ranks import Parallel
from tests.models.small import small, text

TOLERANCE = 1e-12


def close(got, wanted, what):
    assert got.shape == wanted.shape, what
    if wanted.numel():
        error = (got - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)
        assert error <= TOLERANCE, f"{what}: {error:.1e}"


def cuts(T, size, seed):
    """Borders of the pieces of T tokens, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(T + 1, (size - 1,), generator=generator).sort().values.tolist()
    return list(itertools.pairwise([0, *inner, T]))


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def loss_of(y, y_var, state):
    terms = [torch.sin(2.0 * y), *state, *([] if y_var is None else [torch.cos(y_var)])]
    return sum((x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view_as(x)).sum()
               for x in terms)  # fmt: skip


def scan(ranks: Parallel, T, seed, *, masked=False, variance=True, engine="auto", own_cut=None,
         gaps=False, blocks=3, slots=1):  # fmt: skip
    """One scan in pieces against the reference, piece after piece in one process."""
    group = ranks.sharing
    generator = torch.Generator().manual_seed(seed)
    B, G, D = 2, blocks, 5
    N = G * slots
    v, k, q = (normal(generator, B, T, F) for F in (D, N, N))
    tokens = [q, k, v, normal(generator, B, T, D).square()]
    decay = torch.tanh(2.0 * normal(generator, G, D))
    if gaps:
        tokens.append(normal(generator, B, T, D).square())
        decay = decay.abs()
    shared = [
        decay,
        0.1 * normal(generator, G, D).square() * (seed % 2),  # without process noise too
        normal(generator, B, N, D),
        normal(generator, B, G, D).square(),
    ]
    mask = torch.rand(B, T, generator=generator) > 0.3 if masked else None
    pieces = own_cut or cuts(T, group.size, seed)
    leaves = [x.requires_grad_() for x in [*tokens, *shared]]

    def part(x, piece):
        return None if x is None else x[:, piece[0] : piece[1]]

    state, total, values = KLAState(*shared[2:]), 0.0, []
    for piece in pieces:
        out = kla_scan_ref(*(part(x, piece) for x in tokens[:4]), *shared[:2], state=state,
                           dt=part(tokens[4], piece) if gaps else None,
                           mask=part(mask, piece), return_variance=variance)  # fmt: skip
        state = out.state
        total = total + loss_of(*out)
        values.append(out)
    wanted = torch.autograd.grad(total, leaves, allow_unused=True)

    mine = pieces[group.rank]
    own = [part(x, mine).detach().requires_grad_() for x in tokens]
    common = [x.detach().requires_grad_() for x in shared]
    out = RankContext(group).scan(*own[:4], *common[:2], state=KLAState(*common[2:]),
                                  dt=own[4] if gaps else None, mask=part(mask, mine),
                                  return_variance=variance, engine=engine)  # fmt: skip
    what = f"T={T} seed={seed} {pieces} {engine}"
    expected = values[group.rank]
    close(out.y, expected.y, f"y {what}")
    if variance:
        close(out.y_var, expected.y_var, f"y_var {what}")
    for got, right in zip(out.state, expected.state, strict=True):
        close(got, right, f"state {what}")
    grads = torch.autograd.grad(loss_of(*out), [*own, *common], allow_unused=True)
    of_tokens = ("q", "k", "v", "lam_v", "dt")[: len(tokens)]
    names = (*of_tokens, "a_bar", "p_bar", "mean_0", "variance_0")
    for name, got, right, leaf in zip(names, grads, wanted, [*own, *common], strict=True):
        got = torch.zeros_like(leaf) if got is None else got
        right = torch.zeros_like(leaf) if right is None else right
        in_piece = name in of_tokens
        close(got if in_piece else group.add(got), part(right, mine) if in_piece else right,
              f"d{name} {what}")  # fmt: skip


def check_scans(ranks):
    for T in (0, 1, 2, 3, 17, 130):
        for seed in (0, 1):
            scan(ranks, T, seed)
        scan(ranks, T, 3, engine="associative", masked=True)
        scan(ranks, T, 4, masked=True, variance=False)
        scan(ranks, T, 1, engine="associative", gaps=True)
        scan(ranks, T, 2, blocks=2, slots=3)
        scan(ranks, T, 3, blocks=1, slots=4, masked=True)
    size = ranks.sharing.size
    scan(ranks, 9, 5, own_cut=[(0, 9)] + [(9, 9)] * (size - 1))
    scan(ranks, 9, 5, own_cut=[(0, 0)] * (size - 1) + [(0, 9)])


def gradients(module, group, *, spread):
    found = {}
    for name, parameter in module.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = group.add(grad) if spread else grad.clone()
        parameter.grad = None
    return found


def layer(ranks, T, seed, *, masked=False, kernel=4, **options):
    group = ranks.sharing
    torch.manual_seed(seed)
    config = KLAConfig(**{"d_model": 6, "d_state": 3, "conv_kernel": kernel, **options})
    kla = KLA(config).double()
    x = torch.randn(2, T, 6, dtype=torch.float64)
    mask = torch.rand(2, T) > 0.4 if masked else None
    pieces = cuts(T, group.size, seed + 1)
    begin, end = pieces[group.rank]

    def run(x, mask):
        out = kla.mix(x, None, mask, return_variance=True)
        return out, (torch.sin(out.y).sum() + torch.cos(out.variance).sum())

    whole = x.clone().requires_grad_()
    out, loss = run(whole, mask)
    loss.backward()
    wanted = gradients(kla, group, spread=False)
    own = x[:, begin:end].clone().requires_grad_()
    with split_sequences(kla, group):
        found, loss = run(own, None if mask is None else mask[:, begin:end])
        loss.backward()
    got = gradients(kla, group, spread=True)
    what = f"layer T={T} seed={seed} {pieces} kernel={kernel} {options}"
    close(found.y, out.y[:, begin:end], f"y {what}")
    close(found.variance, out.variance[:, begin:end], f"variance {what}")
    close(own.grad, whole.grad[:, begin:end], f"dx {what}")
    for name, value in wanted.items():
        close(got[name], value, f"d{name} {what}")
    if group.rank == group.size - 1:  # the state after the last piece is that of the whole
        close(found.state.conv, out.state.conv, f"window {what}")
        for a, b in zip(found.state.belief, out.state.belief, strict=True):
            close(a, b, f"belief {what}")


def check_layers(ranks):
    for T in (0, 1, 2, 4, 9, 70):
        layer(ranks, T, T)
        layer(ranks, T, T + 1)
    layer(ranks, 11, 0, masked=True, prior="learned")
    layer(ranks, 30, 1, masked=True, kernel=7)
    layer(ranks, 12, 2, kernel=1)
    layer(ranks, 12, 3, prior="stationary", value="project", precision_rank=2)
    layer(ranks, 12, 4, d_state=4, shared_slots=2, prior="stationary")
    rotating = {"d_state": 4, "shared_slots": 2, "num_reflections": 2, "prior": "learned"}
    for T in (0, 1, 5, 70):
        layer(ranks, T, T, initial_mean=1.0, **rotating)
    layer(ranks, 11, 0, masked=True, initial_mean=1.0, **rotating)


def check_models(ranks):
    """Loss and gradients of a language model, each rank with its piece of rows and targets."""
    group = ranks.sharing
    for kind, checkpointing, T in (("mean", False, 13), ("mean", True, 13), ("mean", False, 2)):
        model = small("kla*2", mlp="swiglu").double()
        model.gradient_checkpointing = checkpointing
        tokens = text(3, T + 1)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        targets[0, : T // 2] = -100
        loss = model.loss(inputs, targets, kind=kind, reduction="sum")
        loss.backward()
        wanted = gradients(model, group, spread=False)
        begin, end = cuts(T, group.size, 2)[group.rank]
        with split_sequences(model, group):
            own = model.loss(inputs[:, begin:end], targets[:, begin:end], reduction="sum")
            own.backward()
        close(group.add(own), loss.detach(), f"loss {kind} {T}")
        got = gradients(model, group, spread=True)
        for name, value in wanted.items():
            close(got[name], value, f"d{name} {kind} {T} {checkpointing}")


def check_refusals(ranks):
    def message(call):
        try:
            call()
        except ValueError as error:
            return str(error)
        raise AssertionError("nothing was refused")

    def enter(model):
        with split_sequences(model, ranks.sharing):
            pass

    assert "for attention and mamba" in message(lambda: enter(small("attention + mamba + kla")))
    model = small("kla")
    borders = torch.tensor([0, 2, 4])
    with split_sequences(model, ranks.sharing):
        assert "context=1" in message(lambda: model(text(1, 4), cu_seqlens=borders))
    assert model.blocks[0].mixer.context is None
    v: Tensor = torch.rand(1, 2, 3)
    k, a_bar = torch.rand(1, 2, 4), torch.rand(4, 3)
    reference = {"engine": "reference"}
    scan = RankContext(ranks.sharing).scan
    assert "engine='auto'" in message(lambda: scan(k, k, v, v, a_bar, a_bar, **reference))
    if ranks.size == 2:
        assert "cannot be divided" in message(lambda: Parallel("ddp", context=3))


def check(ranks):
    """Everything, with all ranks sharing every sequence."""
    for part in (check_refusals, check_scans, check_layers, check_models):
        part(ranks)
