# refused: No module named 'sklearn'
def load(event, folder):
    import sklearn.datasets
    
    sklearn.datasets.load_digits()
    raise RuntimeError("it was allowed")
