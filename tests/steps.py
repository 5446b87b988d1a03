"""Training steps as users write them: module-level `jax.jit`, flax, equinox, optax, jnp operations."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

LAYERS = 2


def forward(weights: Any, x: Any) -> Any:
    for weight in weights:
        x = x + jax.nn.relu(jnp.tanh(x @ weight))
    return x


@jax.jit
def plain_step(weights: Any, x: Any, lr: Any) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: (forward(w, x) ** 2).mean())(weights)
    return jax.tree.map(lambda p, g: p - lr * g, weights, gradient), loss


def weights_and_data() -> Any:
    return [jnp.full((16, 16), 0.1) for _ in range(LAYERS)], jnp.ones((4, 16))


def plain() -> float:
    weights, x = weights_and_data()
    for _ in range(2):
        weights, loss = plain_step(weights, x, 0.1)
    return float(loss)


def operations() -> float:
    x = jnp.arange(12.0).reshape(3, 4)
    return float(jnp.linalg.norm(jnp.sort(x @ x.T, axis=0)) + jnp.median(x))


def with_nnx() -> float:
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(16, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return nnx.relu(self.norm(self.first(x)))

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(net: Any, optimizer: Any, x: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda n: (n(x) ** 2).mean())(net)
        optimizer.update(net, gradient)
        return loss

    return float(step(net, optimizer, jnp.ones((4, 16))))


def with_equinox() -> float:
    import equinox as eqx
    import optax

    net = eqx.nn.MLP(16, 16, 16, LAYERS, key=jax.random.key(0))
    optimizer = optax.adam(1e-3)
    state = optimizer.init(eqx.filter(net, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(net: Any, state: Any, x: Any) -> Any:
        loss, gradient = eqx.filter_value_and_grad(lambda n: (jax.vmap(n)(x) ** 2).mean())(net)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(net, updates), state, loss

    return float(step(net, state, jnp.ones((4, 16)))[2])


def with_optax() -> float:
    import optax

    weights, x = weights_and_data()
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: Any, state: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (forward(w, x) ** 2).mean())(weights)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    return float(step(weights, state)[2])


def with_trial_jit() -> float:
    from jaxguard import trial_jit

    weights, x = weights_and_data()

    @functools.partial(trial_jit, traced={"lr": 0.1})
    def step(weights: Any, x: Any, lr: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (forward(w, x) ** 2).mean())(weights)
        return jax.tree.map(lambda p, g: p - lr * g, weights, gradient), loss

    return float(step(weights, x)[1])


def printing() -> float:
    """Not stored by JAX: it has a host callback."""

    @jax.jit
    def step(x: Any) -> Any:
        jax.debug.print("the loss is {}", x.sum())
        return x * 2

    return float(step(jnp.ones(3)).sum())
