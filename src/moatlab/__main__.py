from moatlab.cli import main

main()
