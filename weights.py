"""
Weights in and out: checkpoints of train.py, GPT-2's weights, a folder that transformers loads.
"""
import os
import zipfile
from dataclasses import asdict
from functools import partial

import torch

from model import GPT, GPTConfig


def checkpoint_file(path):
    """ path, if it is no folder; of a folder its best.pt, else its ckpt.pt. """
    best, latest = (os.path.join(path, name) for name in ('best.pt', 'ckpt.pt'))
    return best if os.path.exists(best) else latest if os.path.isdir(path) else path


def load_checkpoint(path, device='cpu'):
    """ The dict that train.py saved, held against the file's checksums: plain values, no code. ValueError if not. """
    try:
        with zipfile.ZipFile(path) as z:
            if damage := z.testzip():  # torch itself does not look
                raise zipfile.BadZipFile(damage)
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise ValueError(f'{path}: no such checkpoint') from None
    except zipfile.BadZipFile as e:
        raise ValueError(f'{path}: not a whole checkpoint (damage: {e})') from e
    except Exception as e:  # zipfile, torch and pickle raise a dozen kinds for a damaged or foreign file
        raise ValueError(f'{path}: not a readable checkpoint ({type(e).__name__})') from e
    if not isinstance(state, dict) or not all(isinstance(state.get(key), dict) for key in ('model', 'model_config')):
        raise ValueError(f'{path}: not a checkpoint of this project (it lacks model or model_config)')
    return state


def model_config(config):
    """ What of a GPTConfig defines the trained function: everything but the choice of kernel. """
    return {k: v for k, v in asdict(config).items() if k != 'kernel'}


def from_checkpoint(path, device='cpu', kernel='auto'):
    """ The model saved in a checkpoint file, or in the best.pt (else ckpt.pt) of a directory, in eval mode. """
    path = checkpoint_file(path)
    state = load_checkpoint(path, device)
    try:
        model = GPT(GPTConfig(**state['model_config'], kernel=kernel))
        model.load_state_dict(state['model'])
    except (TypeError, AttributeError, RuntimeError, ValueError) as e:
        raise ValueError(f'{path}: model and model_config do not fit ({str(e).splitlines()[0]})') from e
    return model.to(device).eval()


def load_gpt2(name):
    """ transformers' GPT2LMHeadModel, from this machine if it is here; ValueError if it cannot be had or differs. """
    try:
        from transformers import GPT2LMHeadModel
        from transformers.utils import logging
        logging.set_verbosity_error()  # its report of what does not fit; we say it in a line
        logging.disable_progress_bar()
        load = partial(GPT2LMHeadModel.from_pretrained, name, output_loading_info=True)
        try:
            gpt2, info = load(local_files_only=True)
        except OSError:
            if os.path.isdir(name):
                raise
            from huggingface_hub import HfApi
            HfApi().model_info(name, timeout=20)  # fails at once where load tries again and again
            gpt2, info = load()
    except Exception as e:  # the package, the file, its format, the network
        hint = "; pip install 'transformers>=4.40'" if isinstance(e, ImportError) else ''
        fault = ' '.join(str(e).split())[:200]
        raise ValueError(f'{name!r}: must be a GPT-2 that can be loaded ({type(e).__name__}: {fault}){hint}') from e
    c = gpt2.config
    same = (c.activation_function in ('gelu_new', 'gelu_pytorch_tanh') and c.n_inner in (None, 4 * c.n_embd)
            and c.scale_attn_weights and not c.scale_attn_by_inverse_layer_idx and c.tie_word_embeddings)
    if info['missing_keys'] or any(key.endswith('.weight') for key in info['unexpected_keys']) or not same:
        raise ValueError(f'{name!r}: must be a GPT-2 like those of OpenAI; its weights or its config.json differ')
    return gpt2


def transpose(weights):
    """ The weights with Conv1D's matrices, which transformers has here, as Linear's; and back. """
    return {k: v.T if k.endswith(('c_attn.weight', 'c_fc.weight', 'c_proj.weight')) else v for k, v in weights.items()}


def from_pretrained(name_or_dir, residual='standard', **overrides):
    """ GPT-2 under any residual rule, in eval mode; overrides: what of GPTConfig its weights leave open. """
    gpt2 = load_gpt2(name_or_dir)
    c = gpt2.config
    fixed = {key: getattr(c, key) for key in ('vocab_size', 'n_layer', 'n_head', 'n_embd')}
    fixed |= {'bias': True, 'norm_eps': c.layer_norm_epsilon}
    for key, value in fixed.items():
        if overrides.get(key, value) != value:
            raise ValueError(f'{key}={overrides[key]!r}: must be {value!r}, as in the weights of {name_or_dir!r}')
    config = GPTConfig(**{'n_ctx': c.n_positions, 'residual': residual} | overrides | fixed)
    if (n_ctx := config.n_ctx) > c.n_positions:
        raise ValueError(f'n_ctx={n_ctx}: must be at most {c.n_positions}, as in the weights of {name_or_dir!r}')
    model, weights = GPT(config), transpose(gpt2.state_dict())
    weights['transformer.wpe.weight'] = weights['transformer.wpe.weight'][:n_ctx]
    model.load_state_dict(model.state_dict() | weights)  # what belongs to the rule stays as it is
    return model.eval()


def save_pretrained(model, folder):
    """ Writes a folder that transformers loads: GPT2LMHeadModel.from_pretrained(folder). Standard mode only. """
    c = model.config
    if c.residual != 'standard':
        raise ValueError(f'residual={c.residual!r}: must be standard, transformers has no GPT-2 with another rule')
    from transformers import GPT2Config, GPT2LMHeadModel
    end = 50256 if c.vocab_size > 50256 else None
    gpt2 = GPT2LMHeadModel(GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.n_ctx, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head,
        layer_norm_epsilon=c.norm_eps, activation_function='gelu_new', resid_pdrop=c.dropout, embd_pdrop=c.dropout,
        attn_pdrop=c.dropout, bos_token_id=end, eos_token_id=end))
    gpt2.load_state_dict(transpose(model.state_dict()), strict=False)  # without biases: its own are zero at first
    gpt2.save_pretrained(folder)


def initial_weights(source, config, tokenizer):
    """ A GPT(config), under any residual rule, with the weights of a standard run's folder; tokenizer: its state(). """
    path = checkpoint_file(source)
    state = load_checkpoint(path)
    old = state['model_config']
    if old.get('residual') != 'standard':
        raise ValueError(f'residual={old.get("residual")!r} in {source!r}: must be standard for weights to go on')
    if state.get('tokenizer') != tokenizer:
        raise ValueError(f'tokenizer={tokenizer["kind"]!r}: must be the one of {source!r}, with all its characters')
    for key in ('n_ctx', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'bias', 'norm_eps'):
        if old.get(key) != getattr(config, key):
            raise ValueError(f'{key}={getattr(config, key)!r}: must be {old.get(key)!r}, as in {source!r}')
    model = GPT(config)
    own = {k: v for k, v in model.state_dict().items() if k.startswith('residual.')}  # the rule's
    try:
        model.load_state_dict(own | state['model'])
    except (AttributeError, RuntimeError) as e:
        raise ValueError(f'{path}: model and model_config do not fit ({str(e).splitlines()[0]})') from e
    return model
