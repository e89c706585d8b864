"""The networks: shapes, sizes, and that nothing in them mixes examples; the private projection and its bill."""

import cmath
import itertools
import math

import pytest
import torch
from torch import nn

from terrine import sgd
from terrine.errors import InvalidArgument
from terrine.features import architectures


def _after_some_steps(build):
    """A network that begins at zero says the same of every example: its head is filled, so that mixing would show."""

    def built():
        model = build()
        nn.init.normal_(model.head.weight, std=0.02)
        return model

    return built


NETWORKS = {
    "mlp on pixels": (lambda: architectures.mlp(784), (1, 28, 28), 795_010),
    "mlp on components": (lambda: architectures.mlp(60), (60,), 71_010),
    "tempered cnn, grey": (architectures.tempered_cnn, (1, 28, 28), 26_010),
    "tempered cnn, colour": (lambda: architectures.tempered_cnn(3, 32), (3, 32, 32), 605_226),
    "wavelet cnn": (_after_some_steps(architectures.WaveletCNN), (1, 28, 28), 29_770),
    "wavelet cnn, colour": (_after_some_steps(lambda: architectures.WaveletCNN(3, 32)), (3, 32, 32), 40_106),
    "scatter linear": (architectures.scatter_linear, (81, 7, 7), 39_700),
    "scatter linear, colour": (lambda: architectures.scatter_linear(3, 32), (243, 8, 8), 155_530),
    "scatter cnn": (architectures.scatter_cnn, (81, 7, 7), 21_450),
    "scatter cnn, colour": (lambda: architectures.scatter_cnn(3, 32), (243, 8, 8), 187_210),
    "resnet": (lambda: architectures.resnet(widths=(16, 32), blocks=1, groups=4), (3, 32, 32), None),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_classifies_and_treats_each_example_alone(name):
    build, shape, size = NETWORKS[name]
    model, x = build(), torch.rand(3, *shape)
    assert model(x).shape == (3, 10)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)
    sgd.validate(model)
    if size is not None:
        assert sum(one.numel() for one in model.parameters()) == size


def test_resnet_18_has_its_published_size():
    assert sum(one.numel() for one in architectures.resnet().parameters()) == 11_173_962


def test_an_unknown_image_size_is_refused():
    with pytest.raises(InvalidArgument, match="28"):
        architectures.tempered_cnn(1, 32)


def test_an_image_that_does_not_divide_is_refused():
    with pytest.raises(InvalidArgument, match="multiple of 4"):
        architectures.WaveletCNN(1, 30)


def test_a_wavelet_network_begins_at_the_image_under_each_wavelet():
    """By the definition: a plane wave under an elongated Gaussian, made to have mean zero, one pixel at a time."""
    model, x = architectures.WaveletCNN(), torch.rand(1, 1, 28, 28)
    real, imaginary = model.waves(x).detach().chunk(2, dim=1)
    under = nn.functional.pad(x, (3, 3, 3, 3))[0, 0, 10:17, 16:23]
    for place, (scale, turn) in enumerate(itertools.product(range(2), range(8))):
        theta, wave, envelope = turn * math.pi / 8, torch.zeros(7, 7, dtype=torch.complex64), torch.zeros(7, 7)
        for down, right in itertools.product(range(-3, 4), range(-3, 4)):
            turned = complex(right, down) * cmath.exp(-1j * theta) / 2**scale
            height = math.exp(-(turned.real**2 + turned.imag**2 / 4) / (2 * 0.8**2))
            envelope[down + 3, right + 3] = height
            wave[down + 3, right + 3] = height * cmath.exp(0.75j * math.pi * turned.real)
        wave -= wave.sum() / envelope.sum() * envelope
        for found, part in ((real, wave.real), (imaginary, wave.imag)):
            wanted = float((under * part).sum() / part.norm())
            assert float(found[0, place, 5, 8]) == pytest.approx(wanted, abs=1e-5)


def test_what_the_head_of_a_wavelet_network_sees_is_normalised():
    model, seen = architectures.WaveletCNN(), []
    model.head.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach()))
    model(torch.rand(3, 1, 28, 28))
    first, second = seen[0].split([16 * 49, 32 * 49], dim=1)
    for part in (first, second):
        assert torch.allclose(part.mean(dim=1), torch.zeros(3), atol=1e-3)
        assert torch.allclose(part.square().mean(dim=1), torch.ones(3), atol=1e-2)


def test_a_wavelet_network_begins_blind_to_sign_brightness_and_contrast():
    """Wavelets have mean zero away from the edges, the modulus has no sign, and the norms divide the contrast out."""
    model, x = _after_some_steps(architectures.WaveletCNN)(), torch.zeros(2, 1, 28, 28)
    x[:, :, 8:20, 8:20] = torch.rand(2, 1, 12, 12)
    assert torch.allclose(model(-x), model(x), atol=1e-4)
    assert torch.allclose(model(50 * x), model(5 * x), atol=0.02)
    assert not torch.allclose(model(x)[0], model(x)[1], atol=0.1)
    shown = (model.waves(x + 1) - model.waves(x)).detach()
    assert float(shown[:, :, 2:-2, 2:-2].abs().max()) < 1e-5


def test_every_weight_of_a_wavelet_network_is_trained_once_its_head_has_left_zero():
    model, x, y = architectures.WaveletCNN(), torch.rand(8, 1, 28, 28), torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    before = [one.detach().clone() for one in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert all(not torch.equal(one, was) for one, was in zip(model.parameters(), before, strict=True))


def test_an_empty_image_has_a_slope():
    """The modulus of nothing must not send NaN into the sums."""
    model = _after_some_steps(architectures.WaveletCNN)()
    nn.functional.cross_entropy(model(torch.zeros(1, 1, 28, 28)), torch.tensor([3])).backward()
    assert all(one.grad.isfinite().all() for one in model.parameters())


def test_the_default_tempered_sigmoid_is_tanh_and_others_stay_bounded():
    x = torch.linspace(-30, 30, 101)
    assert torch.allclose(architectures.TemperedSigmoid()(x), torch.tanh(x), atol=1e-6)
    values = architectures.TemperedSigmoid(scale=1.5, temperature=3.0, offset=0.5)(x)
    assert float(values.min()) >= -0.5
    assert float(values.max()) <= 1.0


def test_features_come_from_each_example_alone_and_the_network_is_left_as_it_was():
    network = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)).train()
    x = torch.rand(5, 6)
    features = architectures.extract(network, x, at_once=2)
    assert torch.allclose(features.norm(dim=1), torch.ones(5))
    assert torch.allclose(features, architectures.extract(network, x))
    assert network.training
    assert not features.requires_grad
