import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, features=6, hidden=12, classes=4):
        super().__init__()
        self.rnn = nn.GRU(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, frames, lengths):
        states, _ = self.rnn(frames)
        last = states[torch.arange(len(frames)), lengths - 1]
        return self.head(last)
