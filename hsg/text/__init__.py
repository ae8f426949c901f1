"""What the policy is told and how its answers are read.

    prompts (strategy, action, judgment, reflection)   markers (the tags in an answer)   chat (templates and token ids)
No model here: texts and ids go in and out.
"""
