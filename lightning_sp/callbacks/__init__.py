"""What is measured and reported while training: throughput, memory, the run's report; and how long checkpoints are kept."""

from lightning_sp.callbacks.checkpoint_retention import CheckpointRetention
from lightning_sp.callbacks.flops import AttentionShape
from lightning_sp.callbacks.memory import MemoryMonitor
from lightning_sp.callbacks.progress_bar import TrainingBar
from lightning_sp.callbacks.run_report import RunReport
from lightning_sp.callbacks.throughput import ThroughputMonitor

__all__ = ["AttentionShape", "CheckpointRetention", "MemoryMonitor", "RunReport", "ThroughputMonitor", "TrainingBar"]
