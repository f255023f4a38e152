"""A diagnosis of a run: healthy or not, what happened when, the likeliest cause, and what to change in the recipe."""

from kedge.monitor.doctor.diagnosis import diagnose
from kedge.monitor.doctor.records import Area, Cause, Change, Diagnosis, History, Moment

__all__ = ["Area", "Cause", "Change", "Diagnosis", "History", "Moment", "diagnose"]
