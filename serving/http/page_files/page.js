"use strict";
{
  const KEY = "branchline-key";
  const EVERY = 4000;
  const find = (id) => document.getElementById(id);
  const live = find("live"), told = find("told"), fresh = find("fresh"), pause = find("pause");
  const keyForm = find("key-form"), loadForm = find("load-form");
  const locked = !keyForm.hidden;
  let timer = 0, paused = false, refreshing = false;

  const headers = () => {
    const key = sessionStorage.getItem(KEY);
    return key ? { Authorization: `Bearer ${key}` } : {};
  };

  const say = (text, bad = false) => {
    told.textContent = text;
    told.className = bad ? "notice bad" : "notice good";
    told.hidden = !text;
  };

  const reason = async (answer) => {
    try {
      return (await answer.json()).error.message;
    } catch {
      return `the server answered ${answer.status}`;
    }
  };

  const askForKey = async (answer) => {
    const given = sessionStorage.getItem(KEY) !== null;
    sessionStorage.removeItem(KEY);
    live.replaceChildren();
    if (loadForm) loadForm.hidden = true;
    keyForm.hidden = false;
    if (given) say(await reason(answer), true);
    find("key").focus();
  };

  const asking = () => document.querySelector("dialog[open]") !== null;

  // Rows may have moved: a button is known by what it does to whom, not by its place.
  const same = (old) => {
    const { act, name } = old.dataset;
    if (!act) return old.id ? find(old.id) : null;
    const buttons = [...live.querySelectorAll("button[data-act]")];
    return buttons.find((b) => b.dataset.act === act && b.dataset.name === name) ?? null;
  };

  // Whatever is typed or has the focus in the part that is replaced stays as it was.
  const put = (html) => {
    const active = live.contains(document.activeElement) ? document.activeElement : null;
    const kept = active && { value: active.value, at: active.selectionStart };
    const parsed = new DOMParser().parseFromString(html, "text/html");
    live.replaceChildren(...parsed.body.childNodes);
    const again = active && same(active);
    if (!again) return;
    if (again.localName === "input") {
      again.value = kept.value;
      again.setSelectionRange(kept.at, kept.at);
    }
    again.focus({ preventScroll: true });
  };

  const refresh = async () => {
    if (refreshing) return;
    refreshing = true;
    clearTimeout(timer);
    let more = true;
    try {
      const answer = await fetch(`/audit/page${location.search}`, { headers: headers(), cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        more = false;
        await askForKey(answer);
      } else if (answer.ok) {
        const html = await answer.text();
        // What a dialog goes back to must not go meanwhile.
        if (!asking()) put(html);
        keyForm.hidden = true;
        if (loadForm) loadForm.hidden = false;
        fresh.textContent = `as of ${new Date().toLocaleTimeString()}`;
        fresh.className = "fine";
        fresh.hidden = pause.hidden = false;
      } else {
        throw new Error(await reason(answer));
      }
    } catch (error) {
      fresh.textContent = `not refreshed: ${error.message}`;
      fresh.className = "fine bad";
      fresh.hidden = false;
    } finally {
      refreshing = false;
      if (more && !paused) timer = setTimeout(refresh, EVERY);
    }
  };

  const change = async (path, body, done) => {
    say("Working…");
    try {
      const answer = await fetch(path, {
        method: "POST",
        headers: { ...headers(), "Content-Type": "application/json" },
        body: JSON.stringify(body),
      });
      if (!answer.ok) {
        say(await reason(answer), true);
        return false;
      }
      say(done);
    } catch (error) {
      say(`The server cannot be reached: ${error.message}`, true);
      return false;
    }
    await refresh();
    return true;
  };

  const open = (dialog, name) => {
    dialog.dataset.name = name;
    dialog.returnValue = "";
    for (const shown of dialog.querySelectorAll("[data-shows]")) shown.textContent = name;
    dialog.showModal();
  };

  live.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-act]");
    if (button) open(find(button.dataset.act), button.dataset.name);
  });

  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      const agreed = dialog.returnValue === "yes";
      // The event of an earlier closing may come after the answer of a later one.
      dialog.returnValue = "";
      if (!agreed) return;
      const name = dialog.dataset.name;
      if (dialog.id === "unload") {
        change("/v1/unload_lora_adapter", { lora_name: name }, `${name} was unloaded.`);
      } else {
        const source = find("swap-source").value;
        const body = { lora_name: name, lora_path: source, load_inplace: true };
        change("/v1/load_lora_adapter", body, `${name} was swapped.`);
      }
    });
  }

  if (loadForm) {
    loadForm.addEventListener("submit", async (event) => {
      event.preventDefault();
      const name = find("load-name").value, source = find("load-source").value;
      const body = { lora_name: name, lora_path: source };
      if (await change("/v1/load_lora_adapter", body, `${name} was loaded.`)) loadForm.reset();
    });
  }

  keyForm.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, find("key").value.trim());
    keyForm.reset();
    say("");
    refresh();
  });

  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Resume" : "Pause";
    if (paused) clearTimeout(timer);
    else refresh();
  });

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else if (!paused) refresh();
  });

  if (locked && sessionStorage.getItem(KEY) === null) find("key").focus();
  else refresh();
}
