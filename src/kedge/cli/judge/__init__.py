"""`kedge judge`: may this judge be trusted?"""
