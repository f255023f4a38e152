"""Stage `gate`: may this model go out?"""
