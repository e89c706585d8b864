"""DP-SGD in a PyTorch loop that never holds a row, on the digits that come with scikit-learn: seconds on one core."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from terrine import sgd
from terrine.events import Budget


def main() -> float:
    bunch = load_digits()
    x, y = torch.tensor(bunch.data / 16, dtype=torch.float32), torch.tensor(bunch.target)
    train, test = (x[:1500], y[:1500]), (x[1500:], y[1500:])

    budget = Budget(epsilon=3.0, delta=1e-5)
    plan = sgd.Plan(examples=1500, lot=150, epochs=30, clip=0.5, budget=budget)
    print(f"noise {plan.noise:.3f} keeps epsilon <= {plan.epsilon:.3f} over {plan.steps} steps")

    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    for _ in sgd.private_steps(model, optimizer, train, plan, loss=nn.CrossEntropyLoss()):
        optimizer.step()

    accuracy = float((model(test[0]).argmax(dim=1) == test[1]).float().mean())
    print(f"accuracy on held-out digits: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
