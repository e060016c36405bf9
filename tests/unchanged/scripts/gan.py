"""A GAN: two models, two optimizers."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--n_epochs", type=int, default=2)
parser.add_argument("--batch_size", type=int, default=6)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--b1", type=float, default=0.5)
parser.add_argument("--latent_dim", type=int, default=5)
parser.add_argument("--output-dir", type=str, default="images")
opt = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
os.makedirs(opt.output_dir, exist_ok=True)
torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(opt.latent_dim, 16), nn.BatchNorm1d(16, 0.8), nn.LeakyReLU(0.2), nn.Linear(16, 9), nn.Tanh()
        )

    def forward(self, z):
        return self.model(z).view(z.size(0), 1, 3, 3)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(9, 16), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, img):
        return self.model(img.flatten(1))


adversarial_loss = nn.BCEWithLogitsLoss()
generator = DDP(Generator())
discriminator = DDP(Discriminator())
data = torch.tanh(torch.randn(126, 1, 3, 3) + 0.5)
sampler = DistributedSampler(TensorDataset(data))
dataloader = DataLoader(TensorDataset(data), batch_size=opt.batch_size, sampler=sampler)
optimizer_G = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(opt.b1, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=opt.lr, betas=(opt.b1, 0.999))
torch.manual_seed(100 + rank)
fixed_z = torch.randn(4, opt.latent_dim)
g_losses, d_losses = [], []

for epoch in range(opt.n_epochs):
    sampler.set_epoch(epoch)
    for i, (imgs,) in enumerate(dataloader):
        valid = torch.ones(imgs.size(0), 1)
        fake = torch.zeros(imgs.size(0), 1)

        # -----------------
        #  Train Generator
        # -----------------
        optimizer_G.zero_grad()
        z = torch.randn(imgs.shape[0], opt.latent_dim)
        gen_imgs = generator(z)
        g_loss = adversarial_loss(discriminator(gen_imgs), valid)
        g_loss.backward()
        optimizer_G.step()

        # ---------------------
        #  Train Discriminator
        # ---------------------
        optimizer_D.zero_grad()
        real_loss = adversarial_loss(discriminator(imgs), valid)
        fake_loss = adversarial_loss(discriminator(gen_imgs.detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        d_loss.backward()
        optimizer_D.step()

        g_losses.append(g_loss.item())
        d_losses.append(d_loss.item())
        print(
            "[Epoch %d/%d] [Batch %d/%d] [D loss: %r] [G loss: %r]"  # noqa: UP031
            % (epoch, opt.n_epochs, i, len(dataloader), d_loss.item(), g_loss.item())
        )
        batches_done = epoch * len(dataloader) + i
        if batches_done % 4 == 0:
            generator.eval()
            with torch.no_grad():
                torch.save(generator(fixed_z), f"{opt.output_dir}/{batches_done}_{rank}.pt")
            generator.train()

torch.save([generator.state_dict(), discriminator.state_dict()], f"{opt.output_dir}/nets_{rank}.pt")
torch.save({"g": g_losses, "d": d_losses}, f"{opt.output_dir}/losses_{rank}.pt")
