"""From prompts to schedules that hold a tail target."""

from sparrow_sglang.errors import InputError


class CalibrationError(InputError):
    """Calibration cannot continue; finished measurements are kept."""
