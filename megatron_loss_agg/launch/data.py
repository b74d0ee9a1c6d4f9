"""The training data of a run, read by Megatron's own data sets from the run's own flags."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import default_collate

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.launch import flags
from megatron_loss_agg.launch.seams import seams
from megatron_loss_agg.mcore.reading.keys import read_batch
from megatron_loss_agg.microbatch import Microbatch


def read(argv: Sequence[str], number: int) -> Iterator[Microbatch]:
    """The first ``number`` rows or packs of training data that Megatron's flags ``argv`` name.

    As Megatron's ``pretrain_gpt.py`` builds them, in the order of its sequential sampler: of
    `SFTDataset` with ``--sft``, `MockGPTDataset` with ``--mock-data``, or else `GPTDataset`. Their
    indices are built in a temporary folder.

    Raises:
        OptionError: there is no `megatron.training`.
        OptionError: a flag or a file is missing, or Megatron cannot read the data.
    """
    # What Megatron says when it is imported and builds indices.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        holder, name = seams()["add_arguments"][0]
    except (ImportError, KeyError) as error:
        raise OptionError(
            "no megatron.training to read its data with; expected a checkout of Megatron-LM on "
            "PYTHONPATH, or --data FILE with lengths or loss masks"
        ) from error
    parser: Any = flags.Parser(add_help=False, allow_abbrev=False)
    args, _ = getattr(holder, name)(parser).parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            dataset = _training_set(args, number, folder)
            for place in range(min(number, len(dataset))):
                yield read_batch(default_collate([dataset[place]]))
        except OptionError:
            raise
        except Exception as error:  # whatever Megatron raises
            raise OptionError(
                f"Megatron cannot read the data ({type(error).__name__}: {error}); expected whole "
                "files, and the data and tokenizer flags of the run after --"
            ) from error


def _training_set(args: Any, number: int, folder: str) -> Any:
    from megatron.core.datasets import gpt_dataset
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.training.datasets.sft_dataset import SFTDataset
    from megatron.training.global_vars import build_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    training = per_split[0] if per_split else blend
    if args.fim_data or args.seq_length is None or not (training or args.mock_data):
        raise OptionError(
            "expected --seq-length and --data-path or --mock-data after --, without --fim-data; "
            "of a script with other data sets, give --data a file of lengths or loss masks"
        )
    if args.dataloader_type not in (None, "single"):
        raise OptionError(
            f"--dataloader-type {args.dataloader_type} reads rows in another order than they are "
            "stored in; expected single, or --data FILE with the rows in the order of the run"
        )
    documents = getattr(args, "dataloader_inter_document_masking", False)
    if documents and not args.sft and args.context_parallel_size > 1:
        raise OptionError(
            "--dataloader-inter-document-masking with --context-parallel-size "
            f"{args.context_parallel_size}, under which Megatron splits the rows of a microbatch "
            "as one; expected the one or the other"
        )
    args.rank = 0  # read by `build_tokenizer`
    given = vars(args) | {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "path_to_cache": folder,
        "inter_document_masking": documents,
        "blend": blend,
        "blend_per_split": per_split and [training, None, None],
        "split": args.split or (blend and "969, 30, 1"),  # Megatron's default
        "tokenizer": build_tokenizer(args),
        "create_attention_mask": False,  # [seq, seq], which nothing reads
    }
    names = {x.name for x in dataclasses.fields(gpt_dataset.GPTDatasetConfig) if x.init}
    config = gpt_dataset.GPTDatasetConfig(**{name: given[name] for name in names & given.keys()})
    if config.split_matrix:
        config.split_matrix[1:] = None, None  # validation and test, which may be empty
    mock = gpt_dataset.MockGPTDataset if args.mock_data else gpt_dataset.GPTDataset
    kind = SFTDataset if args.sft else mock
    # The order depends on how many samples the whole run draws.
    of_run = args.train_samples or (args.train_iters or 0) * (args.global_batch_size or 0)
    sizes = [of_run or number, 0, 0]
    dataset, _, _ = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    if dataset is None:
        raise OptionError(f"--split {args.split} has no training data; expected a number above 0")
    return dataset
