"""Write a run's report when training ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from coder_plugin.data.from_config import pictures_under_regions
from coder_plugin.report.run import write_report
from coder_plugin.training.callbacks import Callback

log = logging.getLogger(__name__)


class WriteReport(Callback):
    """Write ``report.html`` into the run's folder, on the first rank. A failure is logged: the run itself is saved."""

    def on_train_end(self, trainer: Any, results: Mapping[str, Any]) -> None:
        content: dict[str, Any] = {"reason": "the run had no validation data, or --val-frequency 0"}
        with trainer.averaged_weights():
            if trainer.val is not None and trainer.config.evaluation.val_frequency:
                # encoding involves all ranks, so it is outside of the try
                encoded = trainer.encoder(trainer.val) if trainer.encoded is None else trainer.encoded
                content = {"encoder": trainer.encoder, "source": trainer.val, "encoded": encoded}
                content["weights"] = f"the model after epoch {trainer.epoch}"
            if not trainer.log.main:
                return
            trainer.model.eval()
            try:
                if "source" in content:
                    content["pictures"] = pictures_under_regions(trainer.config.data, "val")
                trainer.log.say(f"report: {write_report(trainer.folder, **content)}")
            except Exception:
                log.warning("no report could be written (try: coder-plugin report %s)", trainer.folder, exc_info=True)
