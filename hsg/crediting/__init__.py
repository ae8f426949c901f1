"""The maths of credit: returns and advantages of strategies and turns.

advantages (both levels of StraTA)   estimators (every baseline's; a new one is a function here)   names
"""
