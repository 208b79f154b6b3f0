"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const field = (name) => document.getElementById(name);
  const stations = data.map((routes, index) => {
    const item = field("s" + index);
    const part = (name) => item.querySelector(name);
    return {
      item, routes, name: part("h3").textContent + " " + part(".what").textContent,
      stop: part(".stop"), took: part(".took"), why: part(".why"), bytes: part(".bytes"), branches: part(".branches"),
    };
  });

  function show(station, route) {
    station.stop.className = "stop " + route.route;
    station.stop.textContent = route.letter;
    station.took.textContent = route.producer;
    station.why.textContent = route.reason;
    station.bytes.textContent = route.bytes;
    station.branches.replaceChildren(...route.blame.map((name) => {
      const item = document.createElement("li");
      item.textContent = name;
      return item;
    }));
  }

  function update() {
    const [set, policy, wanted] = ["set", "policy", "route"].map((name) => field(name).value);
    const text = field("find").value.toLowerCase();
    let shown = 0;
    for (const station of stations) {
      const route = station.routes.find((one) => one.set === set && one.policy === policy);
      if (route) show(station, route);
      const told = (station.name + " " + (route ? route.reason + " " + route.blame.join(" ") : "")).toLowerCase();
      const fits = (!wanted || (route && route.route === wanted)) && told.includes(text);
      station.item.hidden = !fits;
      shown += fits;
    }
    field("count").textContent = shown + " of " + stations.length + " stations";
  }

  document.querySelector(".controls").hidden = false;
  for (const name of ["set", "policy", "route"]) field(name).addEventListener("change", update);
  field("find").addEventListener("input", update);
  document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());
  update();
})();
