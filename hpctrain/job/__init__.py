"""From a spec and a profile to a job: plan, checks, script, run directory, submission."""
