// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* Datagrams, their header and Q_Keys, multicast. */
#include "verbs-test.h"

#include <arpa/inet.h>

#define GRH 40

struct ud {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct region mr;
};

static struct ud make_ud(uint32_t qkey, uint32_t create_flags)
{
	struct ud ud;

	ud.pd = MAKE(ibv_alloc_pd(ctx));
	ud.cq = make_cq(128);
	ud.mr = region(ud.pd, 32768, LOCAL);
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = ud.cq,
		.recv_cq = ud.cq,
		.cap = { .max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 4, .max_recv_sge = 4, .max_inline_data = 64 },
		.qp_type = IBV_QPT_UD,
		.comp_mask = IBV_QP_INIT_ATTR_PD | (create_flags ? IBV_QP_INIT_ATTR_CREATE_FLAGS : 0),
		.pd = ud.pd,
		.create_flags = create_flags,
	};
	ud.qp = MAKE_IF_SUPPORTED(ibv_create_qp_ex(ctx, &attr));
	ready_ud(ud.qp, qkey);
	return ud;
}

static struct ibv_ah *make_ah(struct ibv_pd *pd, union ibv_gid to)
{
	struct ibv_ah_attr attr = path_to(to);

	return MAKE(ibv_create_ah(pd, &attr));
}

static bool good_ipv4(const uint8_t *header, size_t payload, union ibv_gid from, union ibv_gid to, uint8_t tos, uint8_t ttl)
{
	uint32_t sum = 0;

	for (int i = 0; i < 20; i += 2)
		sum += header[i] << 8 | header[i + 1];
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return header[0] == 0x45 && header[1] == tos && header[8] == ttl && header[9] == 17 && sum == 0xffff &&
	       memcmp(header + 12, from.raw + 12, 4) == 0 && memcmp(header + 16, to.raw + 12, 4) == 0 &&
	       /* UDP, BTH, DETH, ICRC, and no more than the padding. */
	       (size_t)(header[2] << 8 | header[3]) >= 20 + 8 + 12 + 8 + 4 + payload &&
	       (size_t)(header[2] << 8 | header[3]) <= 20 + 8 + 12 + 8 + 4 + payload + 3;
}

TEST(ud_send_with_header)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, 0);
	struct ibv_ah_attr attr = path_to(gid);

	attr.grh.traffic_class = 0x28;
	attr.grh.hop_limit = 17;
	struct ibv_ah *ah = MAKE(ibv_create_ah(a.pd, &attr));
	fill(a.mr.p, 1000, 1);
	RECV(b.qp, 10, &b.mr, 0, GRH + 1000);
	POST(a.qp, .opcode = IBV_WR_SEND_WITH_IMM, .id = 1, .from = &a.mr, .length = 1000, .ah = ah, .qpn = b.qp->qp_num,
	     .qkey = QKEY, .imm = htonl(0x12345678));
	expect_ok(a.cq, 1, SEND);
	struct ibv_wc wc = expect_ok(b.cq, 10, RECV);
	EQ(wc.byte_len, GRH + 1000);
	EQ(wc.wc_flags & IBV_WC_GRH, IBV_WC_GRH);
	EQ(wc.wc_flags & IBV_WC_WITH_IMM, IBV_WC_WITH_IMM);
	EQ(ntohl(wc.imm_data), 0x12345678);
	EQ(wc.src_qp, a.qp->qp_num);
	EQ(wc.qp_num, b.qp->qp_num);
	CHECK(filled(b.mr.p + GRH, 1000, 1));
	CHECK(all_bytes(b.mr.p + GRH + 1000, 100, 0));
	CHECK(good_ipv4(b.mr.p + 20, 1000, gid, gid, 0x28, 17));
	OK(ibv_destroy_ah(ah));
}

/* The answer goes where the header says. */
TEST(ud_answer_by_header)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, 0);
	struct ibv_ah *ah = make_ah(a.pd, gid), *back;

	RECV(b.qp, 10, &b.mr, 0, GRH + 64);
	RECV(a.qp, 11, &a.mr, 4096, GRH + 64);
	fill(a.mr.p, 64, 2);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 1, .from = &a.mr, .length = 64, .ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY);
	expect_ok(a.cq, 1, SEND);
	struct ibv_wc wc = expect_ok(b.cq, 10, RECV);
	back = MAKE(ibv_create_ah_from_wc(b.pd, &wc, (struct ibv_grh *)b.mr.p, PORT));
	POST(b.qp, .opcode = IBV_WR_SEND, .id = 2, .from = &b.mr, .offset = GRH, .length = 64, .ah = back, .qpn = wc.src_qp,
	     .qkey = QKEY);
	expect_ok(b.cq, 2, SEND);
	expect_ok(a.cq, 11, RECV);
	CHECK(filled(a.mr.p + 4096 + GRH, 64, 2));
}

/* The header is one of IPv6 where the GIDs are. */
TEST(ud_ipv6_header)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, 0);
	struct ibv_gid_entry entry;
	struct ibv_ah_attr attr;
	int index = -1;

	for (int i = 0; i < port.gid_tbl_len && index < 0; i++)
		if (ibv_query_gid_ex(ctx, PORT, i, &entry, 0) == 0 && entry.gid_type == IBV_GID_TYPE_ROCE_V2 &&
		    entry.gid.raw[0] == 0xfe)
			index = i;
	CHECK(index >= 0);
	attr = path_to(entry.gid);
	attr.grh.sgid_index = index;
	attr.grh.flow_label = 0x12345;
	attr.grh.traffic_class = 0x40;
	attr.grh.hop_limit = 5;
	struct ibv_ah *ah = MAKE(ibv_create_ah(a.pd, &attr));
	RECV(b.qp, 10, &b.mr, 0, GRH + 64);
	fill(a.mr.p, 64, 3);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 1, .from = &a.mr, .length = 64, .ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY);
	expect_ok(a.cq, 1, SEND);
	struct ibv_wc wc = expect_ok(b.cq, 10, RECV);
	struct ibv_grh *grh = (struct ibv_grh *)b.mr.p;
	EQ(wc.byte_len, GRH + 64);
	EQ(ntohl(grh->version_tclass_flow), 0x64012345);
	EQ(grh->hop_limit, 5);
	EQ(memcmp(&grh->sgid, &entry.gid, 16), 0);
	EQ(memcmp(&grh->dgid, &entry.gid, 16), 0);
	CHECK(filled(b.mr.p + GRH, 64, 3));
}

/*
 * UCX takes the kind of a datagram's header from `sl`, as mlx5 tells it: 1 for RoCE v2 over IPv6, 2
 * over IPv4. Extended polling says the same.
 */
TEST(ud_sl_tells_the_header)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, 0);
	struct ibv_cq_init_attr_ex attr = { .cqe = 16, .wc_flags = IBV_WC_EX_WITH_SL | IBV_WC_EX_WITH_BYTE_LEN };
	struct ibv_poll_cq_attr poll_attr = { 0 };
	struct ibv_cq_ex *cq_ex = MAKE(ibv_create_cq_ex(ctx, &attr));
	struct pair_with with = { .type = IBV_QPT_UD };
	struct ibv_qp *qp_ex = make_qp(b.pd, ibv_cq_ex_to_cq(cq_ex), &with);
	int found = 0;

	ready_ud(qp_ex, QKEY);
	for (int i = 0; i < port.gid_tbl_len; i++) {
		struct ibv_gid_entry entry;

		if (ibv_query_gid_ex(ctx, PORT, i, &entry, 0) || entry.gid_type != IBV_GID_TYPE_ROCE_V2)
			continue;
		bool ipv4 = entry.gid.raw[0] == 0 && entry.gid.raw[10] == 0xff;
		struct ibv_ah_attr path = path_to(entry.gid);

		found |= ipv4 ? 2 : 1;
		path.grh.sgid_index = i;
		path.sl = 5;
		struct ibv_ah *ah = MAKE(ibv_create_ah(a.pd, &path));
		RECV(b.qp, 10, &b.mr, 0, GRH + 64);
		POST(a.qp, .opcode = IBV_WR_SEND, .id = 1, .from = &a.mr, .length = 64, .ah = ah, .qpn = b.qp->qp_num,
		     .qkey = QKEY);
		expect_ok(a.cq, 1, SEND);
		struct ibv_wc wc = expect_ok(b.cq, 10, RECV);
		EQ(wc.sl, ipv4 ? 2 : 1);
		EQ(wc.wc_flags, IBV_WC_GRH);

		RECV(qp_ex, 11, &b.mr, 0, GRH + 64);
		POST(a.qp, .opcode = IBV_WR_SEND, .id = 2, .from = &a.mr, .length = 64, .ah = ah, .qpn = qp_ex->qp_num,
		     .qkey = QKEY);
		expect_ok(a.cq, 2, SEND);
		uint64_t deadline = now_ns() + TIMEOUT_MS * 1000000ull;
		while (ibv_start_poll(cq_ex, &poll_attr))
			CHECK(now_ns() < deadline);
		EQ(cq_ex->status, IBV_WC_SUCCESS);
		EQ(ibv_wc_read_sl(cq_ex), ipv4 ? 2 : 1);
		EQ(ibv_wc_read_wc_flags(cq_ex), IBV_WC_GRH);
		ibv_end_poll(cq_ex);
		OK(ibv_destroy_ah(ah));
	}
	EQ(found, 3);
}

/*
 * The longest datagram is one MTU; one byte more is an error of the sender, who can go on
 * afterwards.
 */
TEST(ud_length_limits)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, 0);
	struct ibv_ah *ah = make_ah(a.pd, gid);
	uint32_t mtu = 128u << port.active_mtu;

	fill(a.mr.p, mtu, 4);
	RECV(b.qp, 10, &b.mr, 0, GRH + mtu);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 1, .from = &a.mr, .length = mtu, .ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY);
	expect_ok(a.cq, 1, SEND);
	EQ(expect_ok(b.cq, 10, RECV).byte_len, GRH + mtu);
	CHECK(filled(b.mr.p + GRH, mtu, 4));
	/* Nothing but the header. */
	RECV(b.qp, 11, &b.mr, 8192, GRH);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 2, .ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY);
	expect_ok(a.cq, 2, SEND);
	EQ(expect_ok(b.cq, 11, RECV).byte_len, GRH);

	RECV(b.qp, 12, &b.mr, 0, 16384);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 3, .from = &a.mr, .length = mtu + 1, .ah = ah, .qpn = b.qp->qp_num,
	     .qkey = QKEY);
	expect_error(a.cq, 3, LOC_LEN_ERR);
	expect_none(b.cq);
	wait_state(a.qp, IBV_QPS_SQE);
	set_state(a.qp, IBV_QPS_RTS);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 4, .from = &a.mr, .length = 8, .ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY);
	expect_ok(a.cq, 4, SEND);
	EQ(expect_ok(b.cq, 12, RECV).byte_len, GRH + 8);
}

TEST(ud_without_receive_is_lost)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, 0);
	struct ibv_ah *ah = make_ah(a.pd, gid);

	POST(a.qp, .opcode = IBV_WR_SEND, .id = 1, .from = &a.mr, .length = 8, .ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY);
	expect_ok(a.cq, 1, SEND);
	RECV(b.qp, 10, &b.mr, 0, GRH + 8);
	expect_none(b.cq);
	/* To nobody. */
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 2, .from = &a.mr, .length = 8, .ah = ah, .qpn = 0xfffff0, .qkey = QKEY);
	expect_ok(a.cq, 2, SEND);
	EQ(state_of(a.qp), IBV_QPS_RTS);
	no_event();
}

TEST(ud_gather_inline_ex)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, 0);
	struct pair_with with = { .type = IBV_QPT_UD, .inline_data = 64, .ops = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM };
	struct ibv_qp *qp = make_qp(a.pd, a.cq, &with);
	struct ibv_ah *ah = make_ah(a.pd, gid);
	struct ibv_sge list[3] = { sge(&a.mr, 0, 10), sge(&a.mr, 100, 20), sge(&a.mr, 7, 1) };

	ready_ud(qp, QKEY);
	fill(a.mr.p, 200, 5);
	for (int i = 0; i < 4; i++) {
		bool ex = i & 1, in_entry = i & 2;
		struct ibv_qp *from = ex ? qp : a.qp;

		RECV(b.qp, 10 + i, &b.mr, i * 128, 128);
		POST(from, .opcode = IBV_WR_SEND_WITH_IMM, .id = i, .list = list, .num_sge = 3, .imm = htonl(i), .ah = ah,
		     .qpn = b.qp->qp_num, .qkey = QKEY, .ex = ex, .flags = in_entry ? IBV_SEND_INLINE : 0);
		expect_ok(a.cq, i, SEND);
		struct ibv_wc wc = expect_ok(b.cq, 10 + i, RECV);
		EQ(wc.byte_len, GRH + 31);
		EQ(ntohl(wc.imm_data), i);
		EQ(wc.src_qp, from->qp_num);
		CHECK(memcmp(b.mr.p + i * 128 + GRH, a.mr.p, 10) == 0);
		CHECK(memcmp(b.mr.p + i * 128 + GRH + 10, a.mr.p + 100, 20) == 0);
		EQ(b.mr.p[i * 128 + GRH + 30], a.mr.p[7]);
	}
}

/* Q_Keys. */

static uint64_t qkey_violations(void)
{
	struct ibv_port_attr attr;

	OK(ibv_query_port(ctx, PORT, &attr));
	return attr.qkey_viol_cntr;
}

TEST(ud_other_qkey_is_dropped)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, 0);
	struct ibv_ah *ah = make_ah(a.pd, gid);
	uint64_t before = qkey_violations();

	RECV(b.qp, 10, &b.mr, 0, GRH + 8);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 1, .from = &a.mr, .length = 8, .ah = ah, .qpn = b.qp->qp_num,
	     .qkey = QKEY + 1);
	expect_ok(a.cq, 1, SEND);
	expect_none(b.cq);
	no_event();
	CHECK(qkey_violations() > before);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 2, .from = &a.mr, .length = 8, .ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY);
	expect_ok(a.cq, 2, SEND);
	expect_ok(b.cq, 10, RECV);
}

/* Q_Keys can be changed in RTS. */
TEST(ud_qkey_change)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, 0);
	struct ibv_ah *ah = make_ah(a.pd, gid);
	struct ibv_qp_attr attr = { .qkey = 0x2222 };
	struct ibv_qp_init_attr init;

	OK(ibv_modify_qp(b.qp, &attr, IBV_QP_QKEY));
	memset(&attr, 0, sizeof(attr));
	OK(ibv_query_qp(b.qp, &attr, IBV_QP_QKEY, &init));
	EQ(attr.qkey, 0x2222);
	RECV(b.qp, 10, &b.mr, 0, GRH + 8);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 1, .from = &a.mr, .length = 8, .ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY);
	expect_ok(a.cq, 1, SEND);
	expect_none(b.cq);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 2, .from = &a.mr, .length = 8, .ah = ah, .qpn = b.qp->qp_num, .qkey = 0x2222);
	expect_ok(a.cq, 2, SEND);
	expect_ok(b.cq, 10, RECV);
}

/* A Q_Key with its highest bit in a work request stands for that of the queue pair. */
TEST(ud_privileged_qkey_of_work_request)
{
	struct ud a = make_ud(0x3333, 0), b = make_ud(0x3333, 0), c = make_ud(0x80010000, 0);
	struct ibv_ah *ah = make_ah(a.pd, gid);

	RECV(b.qp, 10, &b.mr, 0, GRH + 8);
	RECV(c.qp, 20, &c.mr, 0, GRH + 8);
	/* Not even the right one in the work request reaches a privileged queue pair. */
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 1, .from = &a.mr, .length = 8, .ah = ah, .qpn = c.qp->qp_num,
	     .qkey = 0x80010000);
	expect_ok(a.cq, 1, SEND);
	expect_none(c.cq);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 2, .from = &a.mr, .length = 8, .ah = ah, .qpn = b.qp->qp_num,
	     .qkey = 0x80010000);
	expect_ok(a.cq, 2, SEND);
	expect_ok(b.cq, 10, RECV);
	/* A queue pair that has it may use it. */
	struct ibv_ah *from_c = make_ah(c.pd, gid);
	RECV(c.qp, 21, &c.mr, 64, GRH + 8);
	POST(c.qp, .opcode = IBV_WR_SEND, .id = 3, .from = &c.mr, .offset = 512, .length = 8, .ah = from_c, .qpn = c.qp->qp_num,
	     .qkey = 0x80000000);
	struct ibv_wc one = wait_wc(c.cq), two = wait_wc(c.cq);
	EQ(one.status | two.status, IBV_WC_SUCCESS);
	EQ(one.wr_id + two.wr_id, 3 + 20);
}

/* G-UD-001. */
TEST(ud_privileged_qkey_needs_capability)
{
	struct ud a;
	struct ibv_qp_attr attr = { .qkey = 0x80010000 };

	drop_net_raw();
	a = make_ud(QKEY, 0);
	FAILS(EPERM, ibv_modify_qp(a.qp, &attr, IBV_QP_QKEY));
	attr.qkey = 0x7fffffff;
	OK(ibv_modify_qp(a.qp, &attr, IBV_QP_QKEY));
	set_state(a.qp, IBV_QPS_RESET);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = PORT, .qkey = 0x80000001 };
	FAILS(EPERM, ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
}

/* Multicast. */

static void send_to_group(struct ud *ud, struct ibv_ah *ah, uint64_t id)
{
	POST(ud->qp, .opcode = IBV_WR_SEND, .id = id, .from = &ud->mr, .length = 64, .ah = ah, .qpn = 0xffffff, .qkey = QKEY);
	expect_ok(ud->cq, id, SEND);
}

TEST(mcast_attach_and_detach)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, 0), c = make_ud(QKEY, 0), other = make_ud(QKEY + 1, 0);
	union ibv_gid group = group_gid(1);
	struct ibv_ah *ah = make_ah(a.pd, group);
	struct ud *all[] = { &b, &c, &other };

	for (int i = 0; i < 3; i++)
		for (int j = 0; j < 3; j++)
			RECV(all[i]->qp, 10 * i + j, &all[i]->mr, j * 128, GRH + 64);
	fill(a.mr.p, 64, 6);
	/* Nobody is there. */
	send_to_group(&a, ah, 1);
	expect_none(b.cq);
	for (int i = 0; i < 3; i++)
		OK(ibv_attach_mcast(all[i]->qp, &group, 0));
	send_to_group(&a, ah, 2);
	struct ibv_wc wc = expect_ok(b.cq, 0, RECV);
	EQ(wc.byte_len, GRH + 64);
	EQ(wc.src_qp, a.qp->qp_num);
	CHECK(filled(b.mr.p + GRH, 64, 6));
	CHECK(good_ipv4(b.mr.p + 20, 64, gid, group, 0, 64));
	expect_ok(c.cq, 10, RECV);
	CHECK(filled(c.mr.p + GRH, 64, 6));
	/* It has another Q_Key. */
	expect_none(other.cq);
	/* Another group. */
	union ibv_gid second = group_gid(2);
	struct ibv_ah *ah2 = make_ah(a.pd, second);
	send_to_group(&a, ah2, 3);
	expect_none(b.cq);
	OK(ibv_detach_mcast(b.qp, &group, 0));
	send_to_group(&a, ah, 4);
	expect_ok(c.cq, 11, RECV);
	expect_none(b.cq);
	/* Not attached any more, or never. */
	FAILS(EINVAL, ibv_detach_mcast(b.qp, &group, 0));
	FAILS(EINVAL, ibv_detach_mcast(c.qp, &second, 0));
	OK(ibv_detach_mcast(c.qp, &group, 0));
	OK(ibv_detach_mcast(other.qp, &group, 0));
	send_to_group(&a, ah, 5);
	expect_none(c.cq);
}

TEST(mcast_bad_parameters)
{
	struct ud a = make_ud(QKEY, 0);
	struct pair p = PAIR(.type = IBV_QPT_RC);
	union ibv_gid group = group_gid(3);

	FAILS(EINVAL, ibv_attach_mcast(a.qp, &gid, 0));
	FAILS(EINVAL, ibv_attach_mcast(p.qp[0], &group, 0));
	FAILS(EINVAL, ibv_detach_mcast(p.qp[0], &group, 0));
}

/* A destroyed queue pair is out of its groups, attached twice it gets one copy. */
TEST(mcast_destroy_while_attached)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, 0), c = make_ud(QKEY, 0);
	union ibv_gid group = group_gid(4);
	struct ibv_ah *ah = make_ah(a.pd, group);

	OK(ibv_attach_mcast(b.qp, &group, 0));
	OK(ibv_attach_mcast(b.qp, &group, 0));
	OK(ibv_attach_mcast(c.qp, &group, 0));
	for (int i = 0; i < 4; i++)
		RECV(b.qp, 10 + i, &b.mr, 128 * i, 128);
	RECV(c.qp, 20, &c.mr, 0, 128);
	send_to_group(&a, ah, 1);
	expect_ok(b.cq, 10, RECV);
	expect_none(b.cq);
	expect_ok(c.cq, 20, RECV);
	/* The kernel lets a queue pair go only when it is out of its groups. */
	FAILS(EBUSY, ibv_destroy_qp(c.qp));
	OK(ibv_detach_mcast(c.qp, &group, 0));
	OK(ibv_destroy_qp(c.qp));
	send_to_group(&a, ah, 2);
	expect_ok(b.cq, 11, RECV);
}

/* The sender is a member: what it sends comes back, unless it was created to block that. */
static void loopback(bool block, unsigned int number)
{
	struct ud a = make_ud(QKEY, block ? IBV_QP_CREATE_BLOCK_SELF_MCAST_LB : 0);
	union ibv_gid group = group_gid(number);
	struct ibv_ah *ah = make_ah(a.pd, group);

	OK(ibv_attach_mcast(a.qp, &group, 0));
	RECV(a.qp, 10, &a.mr, 4096, 256);
	fill(a.mr.p, 64, 7);
	POST(a.qp, .opcode = IBV_WR_SEND, .id = 1, .from = &a.mr, .length = 64, .ah = ah, .qpn = 0xffffff, .qkey = QKEY);
	if (block) {
		expect_ok(a.cq, 1, SEND);
		expect_none(a.cq);
		CHECK(all_bytes(a.mr.p + 4096, 256, 0));
		return;
	}
	struct ibv_wc one = wait_wc(a.cq), two = wait_wc(a.cq);
	EQ(one.status | two.status, IBV_WC_SUCCESS);
	EQ(one.wr_id + two.wr_id, 11);
	CHECK(filled(a.mr.p + 4096 + GRH, 64, 7));
}

TEST(mcast_loopback)
{
	loopback(false, 5);
}

TEST(mcast_loopback_blocked)
{
	loopback(true, 6);
}

/* It blocks what it sends, not what it receives. */
TEST(mcast_loopback_blocked_still_receives)
{
	struct ud a = make_ud(QKEY, 0), b = make_ud(QKEY, IBV_QP_CREATE_BLOCK_SELF_MCAST_LB);
	union ibv_gid group = group_gid(7);
	struct ibv_ah *ah = make_ah(a.pd, group);

	OK(ibv_attach_mcast(b.qp, &group, 0));
	RECV(b.qp, 10, &b.mr, 0, 256);
	send_to_group(&a, ah, 1);
	expect_ok(b.cq, 10, RECV);
}

TEST(mcast_block_flag_is_for_ud)
{
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_cq *cq = make_cq(16);
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS,
		.pd = pd,
		.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB,
	};

	MAKE_FAILS(EINVAL, ibv_create_qp_ex(ctx, &attr));
}

/*
 * Between two processes, or two VMs: the datagrams themselves, and multicast with the loopback
 * blocked.
 */

struct address {
	union ibv_gid gid;
	uint32_t qpn;
};

SIDES(two_ud)
{
	struct ud me = make_ud(QKEY, 0);
	struct address mine = { gid, me.qp->qp_num }, theirs;
	const int rounds = 20;

	for (int i = 0; i < rounds; i++)
		RECV(me.qp, 100 + i, &me.mr, 1024 * i, 1024);
	put(link, &mine, sizeof(mine));
	get(link, &theirs, sizeof(theirs));
	struct ibv_ah *ah = make_ah(me.pd, theirs.gid);
	meet(link);
	for (int i = 0; i < rounds; i++) {
		struct ibv_wc wc;

		if (number == 0) {
			fill(me.mr.p + 24576, 900, i);
			POST(me.qp, .opcode = IBV_WR_SEND, .id = i, .from = &me.mr, .offset = 24576, .length = 40 * i, .ah = ah,
			     .qpn = theirs.qpn, .qkey = QKEY);
			expect_ok(me.cq, i, SEND);
		}
		wc = expect_ok(me.cq, 100 + i, RECV);
		EQ(wc.byte_len, GRH + 40 * i);
		EQ(wc.src_qp, theirs.qpn);
		CHECK(filled(me.mr.p + 1024 * i + GRH, 40 * i, i));
		CHECK(good_ipv4(me.mr.p + 1024 * i + 20, 40 * i, theirs.gid, gid, 0, 64));
		if (number == 1) {
			POST(me.qp, .opcode = IBV_WR_SEND, .id = i, .from = &me.mr, .offset = 1024 * i + GRH, .length = 40 * i,
			     .ah = ah, .qpn = theirs.qpn, .qkey = QKEY);
			expect_ok(me.cq, i, SEND);
		}
	}
	meet(link);
}

SIDES(two_mcast_loopback_blocked)
{
	struct ud me = make_ud(QKEY, IBV_QP_CREATE_BLOCK_SELF_MCAST_LB);
	union ibv_gid group = group_gid(8), theirs;
	struct ibv_ah *ah = make_ah(me.pd, group);
	bool apart;

	OK(ibv_attach_mcast(me.qp, &group, 0));
	RECV(me.qp, 10, &me.mr, 4096, 256);
	put(link, &gid, sizeof(gid));
	get(link, &theirs, sizeof(theirs));
	apart = memcmp(&gid, &theirs, sizeof(gid)) != 0;
	fill(me.mr.p, 64, 20 + number);
	meet(link);
	if (number == 0) {
		send_to_group(&me, ah, 1);
		expect_none(me.cq);
	} else if (apart) {
		expect_ok(me.cq, 10, RECV);
		CHECK(filled(me.mr.p + 4096 + GRH, 64, 20));
	}
	/* How far the flag reaches within one machine, the verbs do not say. */
	meet(link);
}
