# harmless: threads are free to ask for, and share the cores that were given
import tilewise

tilewise.set_num_threads(8)
# honest
