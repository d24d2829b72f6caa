"""GRPO from sparse rollouts: a light driver whose loop is the algorithm.

Data flow: engine -> rollouts -> dense log-probs -> correction -> advantages -> loss -> optimiser
-> weights -> engine. SGLang is touched by the rollout engines only.
"""
