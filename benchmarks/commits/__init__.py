"""How many commits can the state store apply?"""
