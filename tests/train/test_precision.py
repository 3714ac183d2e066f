"""Products of bfloat16 matrices, on processors with and without instructions for them."""

import pytest
import torch

from kalman_attention.train import precision
from kalman_attention.train.precision import RoundedProducts, product_context
from tests.train.toy import run, same, weights

ONE_STEP = {"rtol": 2**-7, "atol": 1e-5}  # float32 and float64 sums may round to neighbours


def matrices(*batch, dtype=torch.bfloat16):
    return (torch.randn(*batch, *shape).to(dtype) for shape in ((5, 7), (5, 300), (300, 7)))


@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
def test_products_are_rounded_once(batch):
    c, a, b = matrices(*batch)
    add = torch.baddbmm if batch else torch.addmm
    with RoundedProducts():
        product, total = a @ b, add(c, a, b, beta=0.5, alpha=2.0)
    exact = a.double() @ b.double()
    torch.testing.assert_close(product, exact.bfloat16(), **ONE_STEP)
    torch.testing.assert_close(total, (c.double() / 2 + 2 * exact).bfloat16(), **ONE_STEP)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_products_are_unchanged(dtype):
    c, a, b = matrices(dtype=dtype)
    with RoundedProducts():
        found = torch.addmm(c, a, b)
    assert torch.equal(found, torch.addmm(c, a, b))


def test_gradients_of_a_layer_under_autocast():
    layer = torch.nn.Linear(300, 7, bias=False)
    x = torch.randn(2, 5, 300, requires_grad=True)
    with RoundedProducts():
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        y.sum().backward()
    weight, values = layer.weight.bfloat16().double(), x.detach().bfloat16().double()
    exact = values @ weight.T
    torch.testing.assert_close(y, exact.bfloat16(), **ONE_STEP)
    torch.testing.assert_close(x.grad[0, 0], weight.sum(0).bfloat16().float(), **ONE_STEP)
    total = values.sum((0, 1)).bfloat16().float().expand(7, 300)
    torch.testing.assert_close(layer.weight.grad, total, **ONE_STEP)


@pytest.mark.parametrize("fast", [True, False])
def test_training_multiplies_in_float32_only_where_it_must(fast, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda: fast)
    products = []
    multiply = RoundedProducts.__torch_dispatch__

    def counted(self, func, *rest):
        products.append(func in precision._PRODUCTS)
        return multiply(self, func, *rest)

    monkeypatch.setattr(RoundedProducts, "__torch_dispatch__", counted)
    first, _ = run(tmp_path / "first", dtype="bfloat16", max_steps=2)
    assert any(products) is not fast
    again, _ = run(tmp_path / "again", dtype="bfloat16", max_steps=2)
    assert same(weights(first), weights(again))


@pytest.mark.parametrize(("dtype", "device"), [("float32", "cpu"), ("bfloat16", "cuda")])
def test_other_computations_are_left_alone(dtype, device, monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda: False)
    assert not isinstance(product_context(dtype, torch.device(device)), RoundedProducts)
