"""The training data of a run, read with Megatron's data sets according to the run's flags."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import default_collate

from megatron_loss_agg.errors import AggregationError, OptionError
from megatron_loss_agg.launch import flags, sft
from megatron_loss_agg.mcore.batches import read_batch
from megatron_loss_agg.microbatch import Microbatch


def read(argv: Sequence[str], number: int) -> Iterator[Microbatch]:
    """The first ``number`` rows or packs of the training data that Megatron's flags ``argv`` name.

    They are built as in ``pretrain_gpt.py`` and come in the order of Megatron's sequential sampler:
    from `SFTDataset` with ``--sft``, `MockGPTDataset` with ``--mock-data``, otherwise `GPTDataset`.
    Their indices are built in a temporary folder. Masks of ``--sft`` data follow our turn flags, in
    ``argv`` or in the environment.

    Raises:
        OptionError: there is no `megatron.training`, a flag or a file is missing, or Megatron
            cannot read the data.
        AggregationError: the data do not fit our flags.
    """
    # Megatron's warnings at import and about its indices do not belong in the answer.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        raise OptionError(
            f"explain --data needs megatron.training to read data, got {error}. Put a checkout of "
            "Megatron-LM on PYTHONPATH, or give --data FILE with lengths or loss masks."
        ) from error
    our_flags, others = flags.process_flags(argv)
    parser = add_megatron_arguments(flags.Parser(add_help=False, allow_abbrev=False))
    args, _ = parser.parse_known_args(others)
    vars(args).update(our_flags)
    flags.hook_options(args)  # checks the words in them
    with tempfile.TemporaryDirectory() as folder:
        try:
            dataset = _training_set(args, number, folder)
            for index in range(min(number, len(dataset))):
                yield read_batch(default_collate([dataset[index]]))
        except AggregationError:
            raise
        except Exception as error:  # whatever Megatron raises
            raise OptionError(
                f"Megatron cannot read the data ({type(error).__name__}: {error}). Give complete "
                "files, and the run's own flags for data and tokenizer after --."
            ) from error


def _training_set(args: Any, number: int, folder: str) -> Any:
    """Megatron's data set for its flags: ``number`` rows or more, with indices in ``folder``."""
    from megatron.core.datasets import gpt_dataset
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.training.datasets.sft_dataset import SFTDataset
    from megatron.training.global_vars import build_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    has_training_data = args.mock_data or (per_split[0] if per_split else blend)
    masks_documents = getattr(args, "dataloader_inter_document_masking", False)
    _check_flags(args, has_training_data, masks_documents)
    args.rank = 0  # read by `build_tokenizer`
    settings = vars(args) | {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "path_to_cache": folder,
        "inter_document_masking": masks_documents,
        "blend": blend,
        "blend_per_split": per_split and [per_split[0], None, None],
        "split": args.split or (blend and "969, 30, 1"),  # Megatron's default
        "tokenizer": build_tokenizer(args),
        "create_attention_mask": False,  # [seq, seq], and nothing reads it
    }
    names = {x.name for x in dataclasses.fields(gpt_dataset.GPTDatasetConfig) if x.init}
    config = gpt_dataset.GPTDatasetConfig(
        **{name: settings[name] for name in names & settings.keys()}
    )
    if config.split_matrix:
        config.split_matrix[1:] = None, None  # no validation and test sets: they may be empty
    mock_or_indexed = gpt_dataset.MockGPTDataset if args.mock_data else gpt_dataset.GPTDataset
    dataset_class = _with_flags(SFTDataset, args) if args.sft else mock_or_indexed
    # The order of the rows depends on the number of samples in the whole run.
    run_samples = args.train_samples or (args.train_iters or 0) * (args.global_batch_size or 0)
    sizes = [run_samples or number, 0, 0]
    dataset, _, _ = BlendedMegatronDatasetBuilder(
        dataset_class, sizes, lambda: True, config
    ).build()
    if dataset is None:
        raise OptionError(
            f"--split must leave training data, got {args.split}. Change the first number of "
            "--split to one above 0."
        )
    return dataset


def _with_flags(dataset_class: type[Any], args: Any) -> type[Any]:
    """Megatron's ``SFTDataset``, its packs with the columns and the mask that our flags ask for."""
    options = sft.SFTOptions.of(args)
    if not options.flags:
        return dataset_class

    def get_item(dataset: Any, index: int) -> Any:
        return options.read_item(dataset_class.__getitem__(dataset, index), dataset, index)

    return type("SFTDataset", (dataset_class,), {"__getitem__": get_item})


def _check_flags(args: Any, has_training_data: Any, masks_documents: bool) -> None:
    """Refuse flags without data, and flags with which the run would read other rows.

    Raises:
        OptionError: such flags were given.
    """
    if args.fim_data or args.seq_length is None or not has_training_data:
        raise OptionError(
            "explain --data needs --seq-length and either --data-path or --mock-data after --, "
            "without --fim-data. Add them, or give --data a file of lengths or loss masks if the "
            "script has other data sets."
        )
    sft.SFTOptions.of(args).check_sft(args)
    if args.dataloader_type not in (None, "single"):
        raise OptionError(
            "--dataloader-type must be single, so that rows are read in the order in which they "
            f"are stored, got {args.dataloader_type}. Change --dataloader-type, or give --data "
            "FILE with the rows in the order of the run."
        )
    if masks_documents and not args.sft and args.context_parallel_size > 1:
        raise OptionError(
            "--dataloader-inter-document-masking needs --context-parallel-size 1 here, since "
            "otherwise Megatron splits the rows of a microbatch as one, got "
            f"{args.context_parallel_size}. Change --context-parallel-size, or remove "
            "--dataloader-inter-document-masking."
        )
