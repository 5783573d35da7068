"""How good an encoder is: mask filling against a unigram guess. Verbs are imported by their module, when called."""
