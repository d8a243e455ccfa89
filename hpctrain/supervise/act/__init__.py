"""Carry out what the policy has decided: requeue, submit a successor, roll back."""
