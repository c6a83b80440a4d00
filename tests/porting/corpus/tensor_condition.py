"""A branch by a tensor's value."""

import torch


class Trapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 1:  # trap: tensor-condition
            x = x / x.max()
        y = -x if (x == 0).all() else x  # trap: tensor-condition
        while y.sum() > 1000:  # trap: tensor-condition
            y = y / 2
        state = {"y": y, "steps": x.shape[1]}
        match x.shape[0]:
            case 2:
                y = y / 2 if state["y"].min() < 0 else y  # trap: tensor-condition
            case _:
                y = (lambda z: z if z.mean() else -z)(y)  # trap: tensor-condition
        rows = {index: row if row.sum() > 0 else -row for index, row in enumerate(y)}  # trap: tensor-condition
        y = y + rows[0] if 0.5 in x else y  # trap: tensor-condition
        try:
            return self.kernel(y)
        except NotImplementedError:
            pass
        return y if not torch.isnan(y).any() else x  # trap: tensor-condition

    def kernel(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.where(x.max() > 1, x / x.max(), x)
        y = torch.where((x == 0).all(), -x, x)
        state = {"y": y, "steps": x.shape[1]}
        match x.shape[0]:
            case 2:
                y = y / 2 if state["steps"] > 2 else state["y"]
            case _:
                y = (lambda z: z if z.ndim > 2 else -z)(y)
        rows = {index: row if row.ndim > 1 else -row for index, row in enumerate(y)}
        y = y + rows[0] if 8 in x.shape else y
        try:
            return self.kernel(y)
        except NotImplementedError:
            pass
        return torch.where(torch.isnan(y).any(), x, y)

    def kernel(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError
