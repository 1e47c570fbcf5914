"""What happens when hundreds of compactions of one table commit at the same moment?"""
