"""How long does an answer take, by key and by ranges of keys, beside other engines?"""
