"""A series with irregular time stamps and missing values: fit, filter, smooth, and fill the gaps.

Missing is not masked. A missing value has precision 0: time passes and the belief gets less sure.
A mask would say that there is no token at all: no time passes, and the output there means nothing.
"""

import argparse

import torch

from kalman_attention import discretise, kla_innovations, kla_scan, kla_smooth

RATE, DIFFUSION, NOISE = 0.1, 0.6, 0.3  # of the process that is simulated, and of what is seen


def simulate(T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Times between values, an Ornstein-Uhlenbeck process there, and noisy values, [1, T] each."""
    dt = torch.distributions.Exponential(1.0).sample((T,))
    a, p = discretise(torch.tensor(RATE), torch.tensor(DIFFUSION), dt)
    z, path = torch.zeros(()), []
    for t in range(T):
        z = a[t] * z + p[t].sqrt() * torch.randn(())
        path.append(z)
    signal = torch.stack(path)[None]
    return dt[None], signal, signal + NOISE * torch.randn(1, T)


def main() -> None:
    """Fit decay and noise to what is seen, then say what was hidden."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    (dt, signal, v), k = simulate(300), torch.ones(1, 300, 1)
    seen = torch.rand_like(v) < 0.8
    v = v.where(seen, torch.nan).unsqueeze(-1)  # NaN where nothing was observed; it is never read
    logs = torch.zeros(3, requires_grad=True)  # log of decay rate, diffusion, observation noise
    optimiser = torch.optim.Adam([logs], lr=0.1)
    for step in range(steps):
        rate, diffusion, noise = logs.exp()
        a_bar, p_bar = discretise(*(x.view(1, 1) for x in (rate, diffusion, torch.ones(()))))
        lam_v = seen.unsqueeze(-1) / noise**2  # precision 0 where a value is missing
        loss = -kla_innovations(k, v, lam_v, a_bar, p_bar, dt=dt).log_likelihood.sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 25 == 0:
            print(f"step {step:3d}  negative log-likelihood {loss.item():.1f}")
    print("rate, diffusion, noise:", [round(x.item(), 2) for x in logs.exp()])
    print("simulated with:        ", [RATE, DIFFUSION, NOISE])
    call = (k, k, v, lam_v.detach(), a_bar.detach(), p_bar.detach())
    known = kla_scan(*call, dt=dt, return_variance=True)
    for name, found in (("up to then", known), ("in hindsight", kla_smooth(*call, dt=dt))):
        error = (found.y[..., 0] - signal)[~seen].square().mean().sqrt()
        expected = found.y_var[..., 0][~seen].mean().sqrt()
        print(f"missing values, {name}: error {error:.2f}, expected {expected:.2f}")


if __name__ == "__main__":
    main()
