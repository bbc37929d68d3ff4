"""Modules along a sequence as users write them, with a state from token to token, or a statistic: loops, scans, packed rows, norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.global_view.whole import E

MODULES: dict[str, type[nn.Module]] = {}


def module(cls: type[nn.Module]) -> type[nn.Module]:
    MODULES[cls.__name__] = cls
    return cls


@module
class GruByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.GRUCell(E, E)

    def forward(self, x, ids, mask):
        h = torch.zeros(x.shape[0], E, dtype=x.dtype)
        o = []
        for t in range(x.shape[1]):
            h = self.c(x[:, t], h) * mask[:, t, None]
            o.append(h)
        return torch.stack(o, 1)


@module
class EMAByLoop(nn.Module):
    def forward(self, x, ids, mask):
        y = x[:, 0]
        o = [y]
        for t in x.unbind(1)[1:]:
            y = 0.9 * y + 0.1 * t
            o.append(y)
        return torch.stack(o, dim=1) * x


@module
class AssocScan(nn.Module):
    "Hillis Steele by shifts"

    def forward(self, x, ids, mask):
        a = x.sigmoid()
        b = x
        d = 1
        while d < x.shape[1]:
            a2 = F.pad(a, (0, 0, d, 0), value=1.0)[:, :-d]
            b2 = F.pad(b, (0, 0, d, 0))[:, :-d]
            b = a * b2 + b
            a = a * a2
            d *= 2
        return b


@module
class LogCumsumScan(nn.Module):
    def forward(self, x, ids, mask):
        f = F.logsigmoid(x)
        c = f.cumsum(1)
        return (c + torch.logcumsumexp(x - c, dim=1)).exp()


@module
class LastNonPad(nn.Module):
    def forward(self, x, ids, mask):
        n = mask.shape[1] - 1 - mask.flip(1).long().argmax(1)
        g = x.gather(1, n.view(-1, 1, 1).expand(-1, 1, E)).squeeze(1)
        return g, x[torch.arange(2), n], x.take_along_dim(n[:, None, None], 1), mask.long().sum(1)


@module
class CircConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(1, 3, 3, padding=1, padding_mode="circular")
        self.d = nn.Conv1d(E, E, 3, padding=1, padding_mode="reflect")
        self.e = nn.Conv1d(E, E, 5, padding=2, padding_mode="circular")

    def forward(self, x, ids, mask):
        return self.c(x[:, None]), self.d(x.mT), self.e(x.mT)


@module
class InstStats(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.InstanceNorm1d(E, affine=True, track_running_stats=True)

    def forward(self, x, ids, mask):
        return self.n(x.mT), self.n(x.mT * 2)


@module
class InstEval(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.InstanceNorm1d(E, affine=True, track_running_stats=True).eval()

    def forward(self, x, ids, mask):
        return self.n(x.mT)


@module
class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.LSTM(E, 6, 2, batch_first=True, bidirectional=True)
        self.g = nn.GRU(E, E, batch_first=True)

    def forward(self, x, ids, mask):
        n = mask.sum(1).cpu()
        p = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        o, (h, c) = self.r(p)
        o, n = pad_packed_sequence(o, batch_first=True, total_length=x.shape[1])
        g, hg = self.g(p)
        g, _ = pad_packed_sequence(g, batch_first=True)
        return o, h, c, n, g, hg


@module
class BNStats(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.BatchNorm1d(E)
        self.c = nn.BatchNorm1d(E, momentum=None)
        self.d = nn.BatchNorm2d(1)

    def forward(self, x, ids, mask):
        return self.b(x.mT), self.c(x.reshape(-1, E)), self.c(x.flatten(0, 1) * 2), self.d(x[:, None])
