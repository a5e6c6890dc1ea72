"""
Weights in and out: checkpoints of train.py, GPT-2's weights, folders that transformers loads.
"""
import os
import sys
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import asdict

import torch

from model import GPT, GPTConfig

# -----------------------------------------------------------------------------
# Checkpoints.

def save(state, path):
    """ Writes a checkpoint whole or not at all: it is renamed to path when it is complete. """
    tmp = f'{path}.tmp'
    try:
        with open(tmp, 'wb') as f:
            torch.save(state, f)
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:  # torch reports a full disk as RuntimeError
        with suppress(OSError):
            os.remove(tmp)
        fault = str(e).splitlines()[0]
        raise RuntimeError(f'{path}: could not be written ({fault}); '
                           'the previous one is whole') from e


def from_checkpoint(path, device='cpu', kernel='auto'):
    """ The model in a checkpoint file, or in a folder's best.pt (else ckpt.pt), in eval mode. """
    path = checkpoint_file(path)
    return build_model(load_checkpoint(path), path, kernel).to(device)


def checkpoint_file(path):
    """ The file that path means: in a folder best.pt or, if there is none, ckpt.pt. """
    best = os.path.join(path, 'best.pt')
    if os.path.exists(best):
        return best
    if os.path.isdir(path):
        return os.path.join(path, 'ckpt.pt')
    return path


def load_checkpoint(path):
    """ The dict that train.py saved, in the CPU's memory: tensors and plain values, no code.

    ValueError if the file is missing, damaged (its checksums are compared) or not one of ours.
    """
    try:
        with zipfile.ZipFile(path) as z:
            if damage := z.testzip():  # torch does not look at the checksums
                raise zipfile.BadZipFile(damage)
        state = torch.load(path, map_location='cpu', weights_only=True)
    except FileNotFoundError:
        raise ValueError(f'{path}: no such checkpoint') from None
    except zipfile.BadZipFile as e:
        raise ValueError(f'{path}: not a whole checkpoint (damage: {e})') from e
    except Exception as e:  # zipfile, torch and pickle raise a dozen kinds of errors
        raise ValueError(f'{path}: not a readable checkpoint ({type(e).__name__})') from e
    for key in ('model', 'model_config'):
        if not isinstance(state, dict) or not isinstance(state.get(key), dict):
            raise ValueError(f'{path}: not a checkpoint of this project (it has no {key})')
    return state


def build_model(state, path, kernel='auto'):
    """ The model of a checkpoint's dict, in eval mode. path: its file, for the error. """
    try:
        model = GPT(GPTConfig(**state['model_config'], kernel=kernel))
        model.load_state_dict(state['model'])
    except (TypeError, AttributeError, RuntimeError, ValueError) as e:
        fault = str(e).splitlines()[0]
        raise ValueError(f'{path}: model and model_config do not fit ({fault})') from e
    return model.eval()


def model_config(config):
    """ What a checkpoint keeps of a GPTConfig: everything but the choice of a kernel. """
    return {key: value for key, value in asdict(config).items() if key != 'kernel'}


# The keys of a GPTConfig that weights decide; the rule, dropout and the like are free.
WEIGHTS_DECIDE = ('n_ctx', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'bias', 'norm_eps')


# -----------------------------------------------------------------------------
# GPT-2's weights.

def gpt2_settings(c):
    """ WEIGHTS_DECIDE of transformers' configuration c. """
    return {'n_ctx': c.n_positions, 'vocab_size': c.vocab_size, 'n_layer': c.n_layer,
            'n_head': c.n_head, 'n_embd': c.n_embd, 'bias': True, 'norm_eps': c.layer_norm_epsilon}


def from_pretrained(name_or_dir, residual='standard', **overrides):
    """ GPT-2 under any residual rule, in eval mode.

    overrides: other keys of GPTConfig. Those that follow from the weights must equal them if given;
    n_ctx may be smaller. Block takes at most as many residual blocks as there are sublayers.
    """
    gpt2 = load_gpt2(name_or_dir)
    fixed = gpt2_settings(gpt2.config)
    n_positions = fixed.pop('n_ctx')
    for key, value in fixed.items():
        if overrides.get(key, value) != value:
            raise ValueError(f'{key}={overrides[key]!r}: must be {value!r}, '
                             f'as in the weights of {name_or_dir!r}')
    default = {'n_ctx': n_positions, 'residual': residual}
    if residual == 'block':
        default['residual_blocks'] = min(GPTConfig.residual_blocks, 2 * fixed['n_layer'])
    config = GPTConfig(**default | overrides | fixed)
    if config.n_ctx > n_positions:
        raise ValueError(f'n_ctx={config.n_ctx}: must be at most {n_positions}, '
                         f'as in the weights of {name_or_dir!r}')
    weights = transpose(gpt2.state_dict())
    positions = 'transformer.wpe.weight'
    weights[positions] = weights[positions][:config.n_ctx]
    model = GPT(config)
    model.load_state_dict(model.state_dict() | weights)  # the rule's own stay as they are
    return model.eval()


@contextmanager
def package_kernels():
    """ While it lasts, `import kernels` finds the installed package, if any, and not kernels.py.

    transformers imports a package that happens to have the name of a file of this project.
    """
    here, path = os.path.dirname(os.path.abspath(__file__)), sys.path[:]
    ours = sys.modules['kernels']
    sys.path[:] = [folder for folder in path if os.path.abspath(folder) != here]
    del sys.modules['kernels']
    try:
        yield
    finally:
        sys.path[:], sys.modules['kernels'] = path, ours


@package_kernels()
def load_gpt2(name):
    """ transformers' GPT2LMHeadModel of that name or folder, downloaded if it is not here.

    ValueError if it cannot be had, or if it is not built like OpenAI's GPT-2.
    """
    try:
        from transformers import GPT2LMHeadModel
        from transformers.utils import logging
        logging.set_verbosity_error()  # our message says what does not fit
        logging.disable_progress_bar()
        try:
            gpt2, info = GPT2LMHeadModel.from_pretrained(
                name, output_loading_info=True, local_files_only=True)
        except OSError:
            if os.path.isdir(name):
                raise
            from huggingface_hub import HfApi
            HfApi().model_info(name, timeout=20)  # fails at once where from_pretrained tries on
            logging.enable_progress_bar()
            gpt2, info = GPT2LMHeadModel.from_pretrained(name, output_loading_info=True)
    except Exception as e:  # the package, the file, its format or the network may be at fault
        hint = "; pip install 'transformers>=4.40'" if isinstance(e, ImportError) else ''
        fault = ' '.join(str(e).split())[:200]
        raise ValueError(f'{name!r}: must be a GPT-2 that can be loaded '
                         f'({type(e).__name__}: {fault}){hint}') from e
    c = gpt2.config
    same = (c.activation_function in ('gelu_new', 'gelu_pytorch_tanh')
            and c.n_inner in (None, 4 * c.n_embd)
            and c.scale_attn_weights
            and not c.scale_attn_by_inverse_layer_idx
            and c.tie_word_embeddings
            and not info['missing_keys']
            and not any(key.endswith('.weight') for key in info['unexpected_keys']))
    if not same:
        raise ValueError(f'{name!r}: must be a GPT-2 like those of OpenAI; '
                         'its weights or its config.json differ')
    return gpt2


def transpose(weights):
    """ GPT-2's weights with the matrices of the sublayers transposed.

    transformers keeps them as (inputs, outputs), in a Conv1D; Linear has (outputs, inputs).
    """
    names = ('c_attn.weight', 'c_fc.weight', 'c_proj.weight')
    return {key: w.T if key.endswith(names) else w for key, w in weights.items()}


@package_kernels()
def save_pretrained(model, folder):
    """ Writes a folder that GPT2LMHeadModel.from_pretrained loads. Only for the standard rule. """
    c = model.config
    if c.residual != 'standard':
        raise ValueError(f'residual={c.residual!r}: must be standard, '
                         'transformers has no GPT-2 with another rule')
    from transformers import GPT2Config, GPT2LMHeadModel
    end = 50256 if c.vocab_size > 50256 else None
    config = GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.n_ctx, n_embd=c.n_embd, n_layer=c.n_layer,
        n_head=c.n_head, layer_norm_epsilon=c.norm_eps, activation_function='gelu_new',
        resid_pdrop=c.dropout, embd_pdrop=c.dropout, attn_pdrop=c.dropout,
        bos_token_id=end, eos_token_id=end)
    gpt2 = GPT2LMHeadModel(config)
    weights = transpose(model.state_dict())
    gpt2.load_state_dict(weights, strict=False)  # a model without biases leaves GPT-2's at zero
    gpt2.save_pretrained(folder)


# -----------------------------------------------------------------------------
# Weights to begin with.

def settings_of_weights(source):
    """ {key: value}: what init_from decides of the model. """
    path = checkpoint_file(source)
    if not os.path.isfile(path):
        return gpt2_settings(load_gpt2(source).config)
    saved = load_checkpoint(path)['model_config']
    keys = WEIGHTS_DECIDE
    if saved.get('residual') != 'standard':  # weights of standard fit any rule
        keys = keys + ('residual', 'residual_blocks')
    return {key: saved[key] for key in keys if key in saved}


def initial_weights(source, config, tokenizer):
    """ A GPT(config) with the weights of a run: source is its folder or checkpoint.

    Weights of a standard run fit any rule, those of another rule only that rule.
    tokenizer: the state() of the one to be used. ValueError names what does not fit.
    """
    path = checkpoint_file(source)
    state = load_checkpoint(path)
    old = state['model_config']
    if state.get('tokenizer') != tokenizer:
        raise ValueError(f'tokenizer={tokenizer["kind"]!r}: must be the one of {source!r}, '
                         'with the same characters in the same order')
    for key in WEIGHTS_DECIDE:
        if old.get(key) != getattr(config, key):
            raise ValueError(f'{key}={getattr(config, key)!r}: must be {old.get(key)!r}, '
                             f'as in {source!r}')
    if old.get('residual') not in ('standard', config.residual):
        raise ValueError(f'residual={config.residual!r}: must be {old.get("residual")!r}, as in '
                         f'{source!r}; only the weights of a standard run fit any rule')
    trained, model = build_model(state, path), GPT(config)
    S = getattr(trained.residual, 'S', None)  # sublayers in a residual block, if there are such
    if old['residual'] != 'standard' and S != getattr(model.residual, 'S', None):
        raise ValueError(f'residual_blocks={config.residual_blocks}: must be '
                         f'{old["residual_blocks"]}, as in {source!r}')
    # A rule that is new to the weights has parameters of its own, which keep their usual start.
    model.load_state_dict(model.state_dict() | trained.state_dict())
    return model
