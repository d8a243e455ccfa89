"""An engine that computes nothing and answers as vLLM does, to rehearse services without a model.

Belongs here: that program: OpenAI's routes, vLLM's metrics, its drain, and failures on request.
Does not belong here: choosing it. No job script names it: an interpreter that is written for a
sandbox starts it in place of vLLM (`interpreter`), with vLLM's own words.
"""
