// Asks for the description, with the reader's key if the server wants one, and gives it to Swagger UI.
"use strict";
(() => {
  const KEY = "truedraft-key"; // where /ui keeps it, too
  const SCHEME = "key"; // the security scheme's name in the description
  const byId = (id) => document.getElementById(id);
  let key = "";
  try {
    key = sessionStorage.getItem(KEY) ?? "";
  } catch {
    // storage is forbidden: the key lasts as long as the page
  }

  function keep(chosen) {
    key = chosen;
    try {
      sessionStorage.setItem(KEY, key);
    } catch {
      // as above
    }
  }

  function askForKey(problem) {
    keep("");
    byId("problem").textContent = problem;
    byId("key-form").hidden = false;
    byId("key").value = "";
    byId("key").focus();
  }

  async function load() {
    byId("problem").textContent = "";
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch("openapi.json", { headers, credentials: "omit", cache: "no-cache" });
    if (response.status === 401) {
      askForKey(key ? "The server did not take this key." : "");
      return;
    }
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const spec = await response.json();
    // The server may be below a path of a proxy: requests go where this page came from.
    spec.servers = [{ url: new URL(".", location.href).href.replace(/\/$/, "") }];
    byId("key-form").hidden = true;
    const ui = SwaggerUIBundle({
      spec,
      dom_id: "#api",
      deepLinking: true,
      presets: [SwaggerUIBundle.presets.apis],
      layout: "BaseLayout",
      validatorUrl: null, // it is on another host
      onComplete: () => {
        if (key) ui.preauthorizeApiKey(SCHEME, key);
      },
    });
  }

  const begin = () => load().catch((error) => (byId("problem").textContent = `No description: ${error.message}`));

  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const chosen = byId("key").value.trim();
    if (!/^[\x21-\x7e]+$/.test(chosen)) {
      byId("problem").textContent = "A key has printable ASCII characters only, and no spaces.";
      return;
    }
    keep(chosen);
    begin();
  });

  // A server with keys is not even asked before there is one.
  if (document.documentElement.dataset.keys === "yes" && !key) askForKey("");
  else begin();
})();
