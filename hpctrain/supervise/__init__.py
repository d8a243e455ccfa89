"""Inside the job: watching launches, gathering evidence, carrying out what the judge decides."""
