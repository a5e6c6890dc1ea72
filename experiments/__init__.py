""" What compare.py calls: a file a verb, and the pictures. Nothing else imports it. """
