import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Utterances(Dataset):
    def __init__(self, n, features=6, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.items = [
            (torch.randn(int(torch.randint(3, 9, (1,), generator=generator)), features, generator=generator), i % 4)
            for i in range(n)
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    frames = torch.nn.utils.rnn.pad_sequence([x for x, _ in batch], batch_first=True)
    lengths = torch.tensor([len(x) for x, _ in batch])
    return frames, lengths, torch.tensor([y for _, y in batch])


def make_loader(n, batch_size):
    data = Utterances(n)
    return DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data), collate_fn=collate)
