"""Makes the adapters of this folder with PEFT, and reads back those written here.

Run outside of CI, with ``pip install peft==0.21.2 torch``:

    python make_peft.py                  writes peft_lora and peft_dora
    python make_peft.py FOLDER OUTPUT    loads FOLDER, and saves the results for the
                                         inputs of outputs.npz
"""

import pathlib
import sys

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model

HERE = pathlib.Path(__file__).parent
CASE = HERE / "peft_lora"


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Linear(8, 12, bias=False)
        self.down_proj = torch.nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    make_case(CASE, use_rslora=True)
    make_case(HERE / "peft_dora", use_dora=True)


def make_case(folder, **kwargs):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8)
    weights = {name: w.detach().numpy().copy() for name, w in model.named_parameters()}
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=3,
            lora_alpha=7,
            target_modules=["up_proj", "down_proj"],
            init_lora_weights=False,
            **kwargs,
        ),
    ).eval()
    for name, parameter in adapted.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + torch.rand_like(parameter)
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    np.savez(folder / "outputs.npz", x=x, y=adapted(x).detach().numpy(), **weights)


def read_back(folder, output):
    held = np.load(CASE / "outputs.npz")
    model = Model()
    weights = {k: torch.tensor(held[k]) for k in held if k not in ("x", "y")}
    model.load_state_dict(weights)
    adapted = PeftModel.from_pretrained(model, folder).eval()
    np.save(output, adapted(torch.tensor(held["x"])).detach().numpy())


if __name__ == "__main__":
    read_back(*sys.argv[1:]) if len(sys.argv) > 1 else make()
