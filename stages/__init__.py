"""The slice of the model that a node trains, in torch.

``TorchBlockStage`` (stages 1..S) and ``TorchEdgeStage`` (stage 0) implement the stage ports of
``protocol.ports``; ``load_corpus`` reads a data node's text, ``stage_bytes`` estimates memory and
``save_stage`` writes weights under Hugging Face's names. Nothing here knows about peers.
"""

from stages.block_stage import TorchBlockStage
from stages.data import Corpus, load_corpus
from stages.edge_stage import TorchEdgeStage
from stages.export import llama_config, save_stage
from stages.memory import stage_bytes
from stages.tokenizer import Tokenizer, make_tokenizer

__all__ = [
    "Corpus",
    "Tokenizer",
    "TorchBlockStage",
    "TorchEdgeStage",
    "llama_config",
    "load_corpus",
    "make_tokenizer",
    "save_stage",
    "stage_bytes",
]
