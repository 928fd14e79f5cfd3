import pytest
import torch

from tf_adapters.testing.plans import tensor_units
from tf_adapters.weight_gradients.parameters import ParameterMask


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))


def test_frozen_parameters_take_no_gradient_and_the_others_are_as_ever():
    net, x = model(), torch.randn(3, 4)
    net(x).sum().backward()
    full = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    mask = ParameterMask(dict(net.named_parameters()))
    with mask.frozen(["0.weight", "2.bias"]):
        loss = net(x).sum()
    with mask.frozen(["0.weight", "2.bias"]):
        loss.backward()
    assert net[0].weight.grad is None
    assert net[2].bias.grad is None
    assert torch.equal(net[0].bias.grad, full["0.bias"])
    assert torch.equal(net[2].weight.grad, full["2.weight"])


def test_a_frozen_layer_keeps_no_activation_for_its_weight_gradient():
    net, x = torch.nn.Linear(4, 4, bias=False), torch.randn(3, 4, requires_grad=True)
    saved = []
    with (
        ParameterMask(dict(net.named_parameters())).frozen(["weight"]),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: t),
    ):
        net(x)
    assert x.data_ptr() not in saved


def test_flags_come_back_after_an_error():
    net = model()
    mask = ParameterMask(dict(net.named_parameters()))
    with pytest.raises(ZeroDivisionError), mask.frozen(["0.weight"]):
        1 / (0 if not net[0].weight.requires_grad else 1)
    assert net[0].weight.requires_grad


def test_what_the_user_froze_stays_frozen_and_is_no_work():
    net = model()
    net[0].weight.requires_grad_(False)
    parameters = dict(net.named_parameters())
    assert [unit.names for unit in tensor_units(parameters)] == [("0.bias",), ("2.weight",), ("2.bias",)]
    with ParameterMask(parameters).frozen(["0.weight", "0.bias"]):
        pass
    assert not net[0].weight.requires_grad
    assert net[0].bias.requires_grad
