from bench.speculation.command import main

raise SystemExit(main())
