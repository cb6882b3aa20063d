from bench.soak.command import main

raise SystemExit(main())
